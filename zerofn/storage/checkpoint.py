"""`save`: write a state to disk, each tensor by its path, so that any number of ranks can load it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..core.arguments import check_flag
from ..core.state import State
from ..core.state_entries import Entry, entries
from ..core.tree import tree_map
from ..eager.optimizer import Optimizer
from ..eager.param_groups import packed
from ..pure.uncompiled import kept_out_of_graphs
from ..ranks.background_thread import settle
from ..ranks.group import Group
from .async_save import Saving, check_no_step_since, check_not_written_since, check_once, copy_to_host
from .buffers import buffers_of, check_can_be_saved
from .checkpoint_match import box_order, saved_name
from .files import absolute_path
from .formatting import dtype_name
from .manifest import ROW_MAJOR
from .saving_ranks import check_replicas, checkpoint_group, row_major, wait_for_all_ranks

# Types besides tensors that a transform of another library may have in its state.
PLAIN_TYPES = (bool, int, float, str, type(None))


@overload
def save(directory: str | os.PathLike, state: State | Optimizer, *, wait: Literal[True] = True) -> None: ...
@overload
def save(directory: str | os.PathLike, state: State | Optimizer, *, wait: Literal[False]) -> Saving: ...
@kept_out_of_graphs("it writes files", "zf.save(directory, state), outside of what is compiled")
def save(directory: str | os.PathLike, state: State | Optimizer, *, wait: bool = True) -> Saving | None:
    """Write a checkpoint; one that is there is replaced.

    Every tensor is kept by its path (`params/blocks.0.weight`, `adamw/exp_avg/blocks.0.weight`), whole or in
    the pieces that ranks have, so any number of ranks can load it. A save that fails or dies at any moment
    leaves the checkpoint that was there: the new one takes its place in a single step, at the end. It needs
    room for both until then.

    With a sharded state every rank calls it, and all must see the same file system. Where parts of a job train
    a model each (a pipeline over one axis of a mesh), all call it together, each part with its own directory.

    Args:
        directory: where; made if it is not there.
        state: of `zf.init` or of a step, or an attached model's `opt`.
        wait: whether to return when it is on disk. `False` copies the tensors to host memory, which takes as much of
            it once more, and writes them in a thread while training goes on. Any number of ranks; the next save or
            load, and the end of the process, wait for it.

    Returns:
        Nothing; with `wait=False` a `Saving`, whose `wait()` returns when it is on disk and raises what went wrong.

    What is kept, and what is yours to keep beside it:

    =====================================  ===========================================================
    of a state                             parameters, the states of all transforms, counters
    of `opt`, besides (in no state)        persistent buffers of the module, such as BatchNorm's running
                                           means; learning rates of `param_groups`, as a scheduler of
                                           torch.optim has set them
    never                                  the scheduler's own `state_dict()`, random number generators, the
                                           place in the data, gradients, `get_extra_state` of modules
    =====================================  ===========================================================

    Buffers are those of the first rank, as where it alone saves a `state_dict()`; loading gives them to all. A
    model that is trained by functions of a state keeps its buffers by itself.

    Raises:
        ValueError: `directory` is "".
        TypeError: no state, or a value in it that is neither a tensor nor a plain number or text.
        RuntimeError: `opt` makes a step meanwhile, in another thread, or with `in_backward=True` has begun one that
            `opt.step()` has not closed; or something writes into the state, such as a step with `donate=True`. A
            checkpoint that was there stays.
        OSError: the disk is full or the directory cannot be written. Nothing is lost.
        RuntimeError: only some ranks call it (`if rank == 0: zf.save(...)`), or some make another call. A rank that is
            late is waited for as long as it is seen to compute, and else for the 25 seconds that
            ZEROFN_TOGETHER_TIMEOUT in the environment may set otherwise. Nothing is written.

    >>> import tempfile, torch, zerofn as zf
    >>> tx = zf.adamw(lr=1e-3)
    >>> state = zf.init(tx, {"w": torch.arange(3.0)})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     zf.save(directory, state)
    ...     loaded = zf.load(directory, like=zf.init(tx, {"w": torch.zeros(3)}))
    >>> loaded.params["w"]
    tensor([0., 1., 2.])
    """
    check_flag("save", "wait", wait)
    return write_checkpoint(directory, state, wait, {})


def write_checkpoint(
    directory: str | os.PathLike,
    state: State | Optimizer,
    wait: bool,
    more: dict[str, Any],
    then: Callable[[Group], None] | None = None,
) -> Saving | None:
    """As `save`; the manifest gets the entries of `more`, and `then(group)` is called once it is in place."""
    from .dcp_writer import save_pieces

    opt = state if isinstance(state, Optimizer) else None
    # The counter of steps is read before anything else is.
    check = None if opt is None else check_no_step_since(opt._own.steps.writes)
    groups = None if opt is None else [_as_json(packed(g)) for g in opt._own.groups.to_save()]
    given = state_of(state, "zf.save(directory, {})")
    check = check or check_not_written_since(given)
    path = absolute_path("zf.save({}, state)", directory)
    settle()
    wait_for_all_ranks("zf.save(directory, state)", given.layout.placement)
    group = checkpoint_group(given.layout.placement, directory)
    buffers = [] if opt is None else buffers_of(opt._own.model)
    header = _header(given, buffers)
    header |= {"param_groups": groups, "buffers": None if opt is None else [e.key for e in buffers], **more}
    if opt is not None:
        opt._own.agree_on_writes()
        opt._own.averages.refuse("zf.save(directory, opt)")
        check_can_be_saved(opt._own.model, buffers)
    try:
        check_replicas(given, group)
    except ValueError:
        check()  # what differs may be what a step has written meanwhile
        raise
    pieces = _pieces(given, buffers if group.rank == 0 else [])
    if not wait:
        pieces, check = copy_to_host(pieces), check_once(check)

    def write() -> None:
        try:
            save_pieces(pieces, path, group, header, check)
        except TimeoutError:
            raise  # of the lock: no disk has failed
        except OSError as error:
            raise _disk_error(directory, error) from error
        if then is not None:
            then(group)

    return write() if wait else Saving(directory, write)


def _pieces(state: State, buffers: list[Entry]) -> dict[str, Any]:
    """The tensors that this rank writes, by name."""
    from .dcp import Piece

    placement = state.layout.placement
    return {
        saved_name(e, placement.copy if e.owner in placement.apart else None): Piece(
            row_major(e.value), e.offset or 0, e.shape
        )
        for e in [*entries(state), *buffers]
        if isinstance(e.value, Tensor)
    }


def _header(state: State, buffers: list[Entry]) -> dict[str, Any]:
    """The manifest without the places of tensors in data files.

    Raises:
        TypeError: entries that cannot be saved, all of them by path.
    """
    placement = state.layout.placement
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    own = entries(state)
    sparse = [e for e in own if isinstance(e.value, Tensor) and e.value.layout is not torch.strided]
    bad = [(e.key, f"is of layout {e.value.layout}; keep x.to_dense()") for e in sparse]
    for e in [*own, *buffers]:
        if e.key in tensors or e.key in values:
            bad.append((e.key, "two entries have this name; give the transform another: tx.named('other')"))
        elif isinstance(e.value, Tensor) and e.value.is_meta:
            bad.append((e.key, "is on the meta device and has no data"))
        elif isinstance(e.value, Tensor):
            about = {"dtype": dtype_name(e.value.dtype), "shape": list(e.shape), **box_order(e)}
            copies = range(placement.copies) if e.owner in placement.apart else [None]
            tensors.update({saved_name(e, copy): about for copy in copies})
        elif isinstance(e.value, PLAIN_TYPES):
            values[e.key] = e.value
        else:
            bad.append((e.key, f"a {type(e.value).__name__} cannot be saved"))
    if bad:
        right = "a state of tensors, numbers and text, each under a name of its own"
        raise TypeError(bad_leaves("zf.save: this state cannot be saved", bad, right))
    head = {"zerofn": _version(), "torch": torch.__version__, "ranks": placement.together, "copies": placement.copies}
    if placement.later:
        head["later"] = [*placement.later]
    if not any("boxes" in about for about in tensors.values()):
        head["version"] = ROW_MAJOR
    return {**head, "values": values, "tensors": tensors}


def _as_json(group: dict[str, Any]) -> dict[str, Any]:
    """A param_group with numbers in the place of tensors."""
    return tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, group)


def state_of(given: Any, where: str, form: bool = False) -> State:
    """The state itself, or that of an attached model's `opt`.

    Args:
        given: by the user.
        where: the call, with `{}` for the argument.
        form: whether its numbers are not needed: then it may be one that has none any more, or half written ones.

    Raises:
        TypeError: it is neither.
        RuntimeError: a step has taken its memory (`donate=True`), or was writing into it when it raised.
    """
    state = given.state if isinstance(given, Optimizer) else given
    if not isinstance(state, State):
        wrong = where.format(type(given).__name__)
        raise TypeError(explain(wrong, "it is not a state", where.format("zf.init(tx, params)")))
    if not form:
        state.check_usable(where.format("state"))
    return state


def _version() -> str:
    try:
        return version("zerofn")
    except PackageNotFoundError:
        return "unknown"


def _disk_error(directory: Any, error: OSError) -> OSError:
    """The error of a disk as one that says which checkpoint is there."""
    notes = getattr(error, "__notes__", [])
    where = "".join(f" {note}" for note in notes if note.startswith("on rank"))
    fate = "".join(f"; {note}" for note in notes if not note.startswith("on rank"))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    right = "free space; room is needed for the old and the new checkpoint" if full else "another directory"
    message = explain(f"zf.save({str(directory)!r}) could not write{where}", f"{error.strerror or error}{fate}", right)
    return type(error)(error.errno, message) if error.errno else type(error)(message)
