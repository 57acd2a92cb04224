"""How `torch.distributed.checkpoint` writes and reads a plain tensor. Imported when it does: it loads much of torch."""

from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as chunks_to_read
from torch.distributed.checkpoint.planner_helpers import _create_write_items as items_to_write

__all__ = ["chunks_to_read", "items_to_write"]
