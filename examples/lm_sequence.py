"""Which part of a batch is a rank's: some of the sequences, and of these the positions that are its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from lm_model import next_byte_loss
from lm_process import RANK, WORLD
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf


class Parts:
    """This rank's place in a mesh of data x sequence.

    Args:
        ranks: that share each sequence.
        seq: bytes in a sequence.
        device: of the model.

    Attributes:
        first: the position of this rank's first byte.
    """

    def __init__(self, ranks: int = 1, seq: int = 0, device: torch.device | None = None) -> None:
        self.ranks, self.place, self.first, self.mesh = ranks, RANK % ranks, 0, None
        if ranks > 1:
            zf.collectives.world_group()  # the job's process group, if torchrun's ranks have none yet
            names = ("data", "sequence")
            kind = device.type if device else "cpu"
            self.mesh = init_device_mesh(kind, (WORLD // ranks, ranks), mesh_dim_names=names)["sequence"]
            self.first = int(torch.arange(seq).tensor_split(ranks)[self.place][0])

    def cut(self, batch: Tensor) -> Tensor:
        """Of (sequences, bytes), what this rank computes with."""
        return batch[RANK // self.ranks :: WORLD // self.ranks].tensor_split(self.ranks, dim=1)[self.place]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over whole sequences, of logits and targets of this rank's bytes."""
        if self.mesh is None:
            return next_byte_loss(logits, targets)
        return zf.sequence_mean(next_byte_loss(logits, targets, reduction="none"), self.mesh)[0]

    def of(self, model: nn.Module) -> AbstractContextManager:
        """While a model is given parts of sequences. Outside it is given whole ones, to generate and to validate."""
        return nullcontext() if self.mesh is None else zf.sequence_parallel(model, self.mesh)


WHOLE = Parts()
