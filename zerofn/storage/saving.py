"""`zf.save`: writes a state to disk, so that any number of ranks can load it."""

from __future__ import annotations

import errno
import math
import os
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from .._compat.tensors import is_wrapper, writes
from .._errors import bad_leaves, explain, printable, users_line
from ..core.arguments import check_flag
from ..core.layout import Placement
from ..core.state import State
from ..core.state_entries import Entry, before, entries
from ..core.tree import flatten, tree_map
from ..core.uncompiled import kept_out_of_graphs
from ..core.wrapper_names import modules_of, saved_buffers
from ..eager.optimizer import Optimizer
from ..eager.param_groups import packed
from ..ranks.backend import gather_objects, raised_on, world
from ..ranks.group import Group
from ..ranks.process_groups import Background, connected, join_background_threads, together, world_group
from .files import ROW_MAJOR, absolute_path
from .pieces import Piece, save_pieces
from .tables import dtype_name

# ----------------------------------------------------------------------------------------------------------------------
# These functions find the ranks that save and load a state together, and check that their states fit together.


MAX_COMPARED = 4096  # elements of a tensor that is compared between ranks


def row_major(x: Tensor) -> Tensor:
    """The elements in one dimension, in the order in which they are saved."""
    return x.detach().contiguous().view(-1)


def wait_for_all_ranks(call: str, placement: Placement) -> None:
    """Return when all ranks have made this call; raise a RuntimeError if some make another one, or none."""
    if placement.together > 1:
        everybody = tuple(range(world()[1]))
        together(call, everybody, f"{call} on every rank, without `if rank == 0:` around it")


def checkpoint_group(placement: Placement, writes: str | os.PathLike | None = None) -> Group:
    """The ranks that save or load a state together.

    Args:
        placement: how the state lies over ranks.
        writes: the directory, if they save. Groups of a job's ranks that train a model each must not share one.
    """
    if placement.together == 1:
        return Group()
    world = world_group("checkpoint")
    if world.size == placement.together:
        return world
    group = connected(placement.axes)
    if writes is not None:
        _check_apart(writes, group, world)
    return group


def raise_on_all_ranks(failure: BaseException | None, group: Group) -> None:
    """Raise the error of one rank on every rank; of several errors the first rank's.

    A file may be damaged or missing on some ranks only, and the others must not go on without them.
    """
    for rank, other in zip(group.ranks, gather_objects(failure, group), strict=True):
        if other is not None:
            raise raised_on(other, rank)


def _check_apart(place: str | os.PathLike, group: Group, world: Group) -> None:
    mine = os.path.abspath(place)
    answers = gather_objects((group.ranks, mine), world)
    same = next((ranks for ranks, other in answers if other == mine and ranks != group.ranks), None)
    if same is not None:
        wrong = f"ranks {list(group.ranks)} and {list(same)} save to {os.fspath(place)!r}"
        why = "each of these parts of the job has a state of its own, and one would replace the other"
        right = 'zf.save(f"{directory}/{part}", state), with another part for each'
        raise ValueError(explain(wrong, why, right))


def check_replicas(state: State, group: Group) -> None:
    """Raise if replicated tensors differ between ranks, because each is written once.

    Small tensors are compared. Where leaves are sharded, large ones are compared too: they may belong to shards, in
    lists of another library or with shapes that do not follow the leaf's.
    """
    if group.size == 1:
        return
    placement = state.layout.placement
    compared = {
        e.key: (e.shape, zlib.crc32(row_major(e.value).view(torch.uint8).cpu().numpy().tobytes()))
        for e in entries(state)
        if e.offset is None and e.owner not in placement.apart
        if 0 < e.value.numel() <= MAX_COMPARED or placement.size > 1 or e.of_part
    }
    answers = gather_objects(compared, group)
    # The keys of all ranks are compared, so that every rank raises: one that went on would wait for the others.
    keys = dict.fromkeys(key for answer in answers for key in answer)
    bad = [(key, "differs between ranks") for key in keys if len({a.get(key) for a in answers}) > 1]
    if bad:
        right = "state that is per leaf and shaped like it, which is sharded, or equal on all ranks"
        if placement.size > 1:
            right += ';\nneeds="leaf" for a transform whose state is of another shape than its leaf'
            right += ";\nof a guest, which names pieces at will, by torch.distributed.checkpoint of opt.state_dict()"
        raise ValueError(bad_leaves("zf.save: what should be equal on every rank is not", bad, right))


# ----------------------------------------------------------------------------------------------------------------------
# Persistent buffers of a module, such as running means, are in a checkpoint of `opt` and in no state.


OWNER = "buffers"


def buffers_of(model: nn.Module) -> list[Entry]:
    """The buffers in `model.state_dict()`, by the names that they have in the plain model."""
    return [Entry(OWNER, "", name, x, tuple(x.shape)) for name, x in saved_buffers(model).items()]


def check_can_be_saved(model: nn.Module, buffers: list[Entry]) -> None:
    """Raise for buffers that are not plain tensors; warn that `get_extra_state` is not saved."""
    bad = [
        (e.key, f"a {type(e.value).__name__} of layout {e.value.layout} is no plain tensor")
        for e in buffers
        if e.value.layout is not torch.strided or e.value.is_quantized or is_wrapper(e.value)
    ]
    if bad:
        right = (
            "register_buffer(..., persistent=False), for what the model makes anew\n"
            "         zf.save(directory, opt.state), which leaves buffers out, and torch.save for them"
        )
        raise TypeError(bad_leaves("zf.save: these buffers cannot be saved", bad, right))
    plain = nn.Module.get_extra_state
    extra = [name or "the model" for name, m in modules_of(model) if type(m).get_extra_state is not plain]
    if extra:
        names = ", ".join(map(printable, extra))
        warnings.warn(
            f"zf.save(directory, opt): what get_extra_state gives, of {names}, is not in the checkpoint. It may "
            "be anything, and only a pickle could keep it: torch.save it beside the checkpoint.",
            stacklevel=users_line(),
        )


def without_buffers(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without the buffers, as of a saved state."""
    names = set(manifest.get(OWNER) or ())
    return {**manifest, "tensors": {key: about for key, about in manifest["tensors"].items() if key not in names}}


def warn_of_missing(directory: Any, buffers: list[Entry], manifest: dict[str, Any]) -> None:
    """Warn if a model has buffers and the checkpoint has none."""
    if not buffers or manifest.get(OWNER) is not None:
        return
    names = ", ".join(e.path for e in buffers[:3]) + (f" and {len(buffers) - 3} more" if len(buffers) > 3 else "")
    older = manifest["version"] == 1
    why = "it is of an older zerofn, which saved none" if older else "it was saved from a state, which has none"
    warnings.warn(
        explain(
            f"zf.load({str(directory)!r}, like=opt): the model's buffers ({names}) stay as they are",
            f"the checkpoint has no buffers: {why}",
            "zf.save(directory, opt), which saves them; and load those of this checkpoint from where they are",
        ),
        stacklevel=users_line(),
    )


def _check_can_be_written(call: str, buffers: list[Entry], new: dict[str, Tensor]) -> None:
    """Raise for buffers that cannot be written in place, unless they have these values already."""
    bad = [
        (e.key, "its elements share memory (it is expanded), so they cannot be written")
        for e in buffers
        if _expanded(e.value) and not torch.equal(e.value, new[e.key])
    ]
    if bad:
        raise ValueError(bad_leaves(f"{call}: these buffers cannot be loaded", bad, "register_buffer(name, x.clone())"))


def load_with_buffers(
    opt: Optimizer,
    call: str,
    state: State,
    groups: list[dict[str, Any]] | None,
    buffers: list[Entry],
    new: dict[str, Tensor],
) -> None:
    """Write a state, learning rates and buffers into an attached model: either all of them, or an error and none.

    Args:
        opt: of the model.
        call: the function that was called, for messages.
        state: the state to load.
        groups: learning rates; by default they stay.
        buffers: the buffers to write.
        new: their values, by key.
    """
    _check_can_be_written(call, buffers, new)
    own = opt._own
    own.load("load_state", partial(own.dicts.read_state, state, groups), partial(_write_buffers, buffers, new))


@torch.no_grad()
def _write_buffers(buffers: list[Entry], new: dict[str, Tensor]) -> None:
    """Copy new values into the buffers in place, so that references to them stay valid."""
    for e in buffers:
        if not _expanded(e.value):
            e.value.copy_(new[e.key])


def _expanded(x: Tensor) -> bool:
    return any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# A `Saving` is a checkpoint that a thread writes from copies in host memory while training goes on.


class Saving:
    """A running save, returned by `zf.save(directory, state, wait=False)`.

    An error is printed when it happens, and `wait()` raises it; the old checkpoint is then unchanged. The process does
    not end before the save has ended, and the next save or load waits for it.
    """

    def __init__(self, directory: str | os.PathLike, write: Callable[[], None]):
        self.directory = os.fspath(directory)
        self._thread = Background(f"zf.save({self.directory!r}, ..., wait=False)", write)

    @property
    def done(self) -> bool:
        """Whether it has ended, with an error or without."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is done.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it was not done by then, and goes on.
            Exception: the error that the save raised.
        """
        self._thread.join(timeout)
        if not self.done:
            raise TimeoutError(f"the save in {self.directory!r} was not done after {timeout} s; it goes on.")
        if self._thread.error is not None:
            raise self._thread.error

    def __repr__(self) -> str:
        status = "under way" if not self.done else "failed" if self._thread.error else "done"
        return f"Saving({self.directory!r}, {status})"


def copy_to_host(pieces: dict[str, Any]) -> dict[str, Any]:
    """Copies of the pieces in host memory, so that a step may write into the original tensors."""
    return {key: piece._replace(data=piece.data.to("cpu", copy=True)) for key, piece in pieces.items()}


def check_no_step_since(writes: Callable[[], int]) -> Callable[[], None]:
    """A function that raises if an attached model has made a step since this call, or was making one during it.

    It compares a counter and takes no lock: with a lock training would wait for a disk.

    Args:
        writes: returns how often a write has begun or ended; odd during a write.
    """
    before = writes()

    def check() -> None:
        if before % 2 or writes() != before:
            wrong = "zf.save(directory, opt) in another thread while opt makes a step, or between a backward and "
            wrong += "opt.step() with in_backward=True, where backward is the step"
            right = "zf.save(directory, opt) after opt.step(); with wait=False in the thread that trains: it copies, "
            right += "and writes meanwhile"
            raise RuntimeError(explain(wrong, "some of what is kept is of before the step and some of after it", right))

    return check


def check_not_written_since(state: State) -> Callable[[], None]:
    """A function that raises if, since this call, a state was donated or one of its tensors was written into."""
    tensors = [x for x in flatten(state)[0] if isinstance(x, Tensor)]
    before = writes(tensors)

    def check() -> None:
        state.check_usable("zf.save(directory, state)")
        if writes(tensors) != before:
            wrong = "zf.save(directory, state) while something writes into the state, in another thread"
            right = "zf.save(directory, opt) of an attached model; else zf.save(directory, state, wait=False) in the "
            right += "thread that\nwrites: it copies first"
            raise RuntimeError(explain(wrong, "some of what is kept is of before it and some of after it", right))

    return check


def check_once(check: Callable[[], None]) -> Callable[[], None]:
    """Call `check` at once, and return a function that raises its error.

    Copies have been made by then, so a later step does no harm. The error is raised later, by all ranks together.
    """
    found: Exception | None = None
    try:
        check()
    except RuntimeError as error:
        found = error

    def raise_found() -> None:
        if found is not None:
            raise found

    return raise_found


# ----------------------------------------------------------------------------------------------------------------------
# These functions compare the manifest of a checkpoint with a state: names, shapes, dtypes and the order of elements.


def saved_name(e: Entry, copy: int | None) -> str:
    """The name of an entry in a checkpoint. A sum that is not yet reduced has one for each copy."""
    return e.key if copy is None else f"{e.key}@{copy}"


def copies_in(manifest: dict[str, Any]) -> int:
    """How many copies a checkpoint has of each unreduced gradient sum; in older checkpoints one for each rank."""
    return manifest.get("copies", manifest["ranks"])


def box_order(e: Entry) -> dict[str, Any]:
    """The boxes of a tensor, for the manifest, if its elements are saved box by box and not in row-major order."""
    if e.within is None or e.within.ordered:
        return {}
    return {"boxes": [[list(x) for x in box] for box in e.within.boxes]}


def in_other_order(e: Entry, about: dict[str, Any] | None) -> bool:
    """Whether the checkpoint has the elements of an entry in another order than the entry."""
    return about is not None and about.get("boxes") != box_order(e).get("boxes")


def name_to_read(e: Entry, manifest: dict[str, Any], placement: Placement) -> str:
    """The name under which an entry of `like` is read."""
    if e.key in manifest["tensors"]:
        return e.key
    # If the checkpoint has another number of copies, any will do: its window is closed, so the sums are not used.
    return saved_name(e, placement.copy if copies_in(manifest) == placement.copies else 0)


def differences(wanted: list[Entry], manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Every path in which the checkpoint and the state differ, with the difference."""
    saved = {_base(name, manifest): about for name, about in manifest["tensors"].items()}
    bad = []
    for e in wanted:
        about = saved.pop(e.key, None)
        if about is None:
            if before(e) is None and (e.key not in manifest["values"] or e.shape):
                bad.append((e.key, "missing: the checkpoint does not have it"))
            continue
        bad += [(e.key, reason) for reason in _misfits(e, about)]
        if in_other_order(e, about) and e.key not in manifest["tensors"]:
            bad.append((e.key, "sums that are not reduced yet, of a model that was cut otherwise; end the window"))
    return bad + [(key, "unexpected: only the checkpoint has it") for key in saved]


def _base(name: str, manifest: dict[str, Any]) -> str:
    """A name without its "@copy". A key may contain "@" itself, but then not for every copy."""
    base, _, copy = name.rpartition("@")
    copies = copies_in(manifest)
    apart = copy.isdecimal() and all(f"{base}@{i}" in manifest["tensors"] for i in range(copies))
    return base if apart and copies > 1 else name


def _misfits(e: Entry, about: dict[str, Any]) -> list[str]:
    found = []
    shape, dtype = tuple(about["shape"]), about["dtype"]
    # A rank whose shard of every leaf is empty cannot tell shards from a slot without elements: a leaf without
    # elements may have the shape of the full tensor or of the shard.
    empty = e.value.numel() == 0 and math.prod(shape) == 0
    vacant = empty and (math.prod(e.shape) == 0 or (e.offset is not None and shape == (0,)))
    if shape != tuple(e.shape) and not vacant:
        found.append(f"shape {shape} in the checkpoint, {tuple(e.shape)} here")
    if dtype != dtype_name(e.value.dtype):
        found.append(f"{dtype} in the checkpoint, {dtype_name(e.value.dtype)} here")
    return found


def misfit_message(directory: Any, bad: list[tuple[str, str]]) -> str:
    right = "zf.load(directory, like=zf.init(tx, params)) with the pipeline and the model that saved it"
    if all(" in the checkpoint, " in reason and not reason.startswith("shape") for _, reason in bad):
        right += (
            "; dtypes are never changed silently. To change the pipeline, load with the old one and begin anew:\n"
            "         old = zf.load(directory, like=zf.init(old_tx, params))\n"
            "         state = zf.init(new_tx, zf.full_params(old_tx, old))"
        )
    if any(key.endswith("/codes") and reason.startswith("missing") for key, reason in bad):
        right += (
            "; then, for a chain with quantize,\n"
            "         state = zf.quantize_state(new_tx, state, like=zf.init(new_tx, params))"
        )
    if all(reason.startswith("unexpected") and not key.startswith(("params/", "buffers/")) for key, reason in bad):
        right += (
            ";\n         where parameters were trained that are frozen here: p.requires_grad_(True) before the load"
        )
    if all(key.startswith("buffers/") for key, _ in bad):
        right = "the model that saved it; without its buffers, opt.load_state(zf.load(directory, like=opt.state))"
    return bad_leaves(f"the checkpoint in {directory} does not fit this state", bad, right)


# ----------------------------------------------------------------------------------------------------------------------
# `save` writes a state to disk, each tensor by its path, so that any number of ranks can load it.


@overload
def save(directory: str | os.PathLike, state: State | Optimizer, *, wait: Literal[True] = True) -> None: ...
@overload
def save(directory: str | os.PathLike, state: State | Optimizer, *, wait: Literal[False]) -> Saving: ...
@kept_out_of_graphs("it writes files", "zf.save(directory, state), outside of what is compiled")
def save(directory: str | os.PathLike, state: State | Optimizer, *, wait: bool = True) -> Saving | None:
    """Write a checkpoint, which replaces an old one in the same directory.

    Every tensor is saved by its path (`params/blocks.0.weight`, `adamw/exp_avg/blocks.0.weight`), in full or in the
    shards that ranks have, so any number of ranks can load it. If a save fails or is killed at any moment, the old
    checkpoint stays, because the new checkpoint replaces it in a single step at the end. Until then the disk needs room
    for both.

    With a sharded state every rank must call `save`, and all ranks must see the same file system. If several groups of
    ranks train a model each (a chain over one axis of a mesh), all groups call `save` together, each with its own
    directory.

    Args:
        directory: the checkpoint's directory; it is made if it does not exist.
        state: of `zf.init` or of a step, or an attached model's `opt`.
        wait: whether to return only when it is on disk. `False` copies the tensors to host memory, which must have room
            for them, and writes them in a thread while training goes on, on any number of ranks. The next save or
            load, and the end of the process, wait for it.

    Returns:
        Nothing; with `wait=False` a `Saving`, whose `wait()` returns when it is on disk and raises its error.

    What a checkpoint has, and what you must keep yourself:

    =====================================  ===========================================================
    saved from a state and from `opt`      parameters, the states of all transforms, counters
    saved from `opt` only                  persistent buffers of the module, such as BatchNorm's running
                                           means; learning rates of `param_groups`, as a scheduler of
                                           torch.optim has set them
    never saved                            the scheduler's own `state_dict()`, random number generators, the
                                           place in the data, gradients, `get_extra_state` of modules
    =====================================  ===========================================================

    `save` writes the buffers of the first rank, and `load` gives them to all ranks. In the pure route a checkpoint has
    no buffers of the model: save them yourself.

    Raises:
        ValueError: `directory` is "".
        TypeError: `state` is no state, or has a value that is neither a tensor nor a plain number or text.
        RuntimeError: while `save` runs, another thread makes a step of `opt`, or writes into the state, as a step with
            `donate=True` does. An old checkpoint stays.
        RuntimeError: with `in_backward=True`, a backward has begun a step, and `opt.step()` has not ended it. An old
            checkpoint stays.
        OSError: the disk is full or the directory cannot be written. Nothing is lost.
        RuntimeError: only some ranks call `save` (`if rank == 0: zf.save(...)`), or some ranks make another call.
            Nothing is written. The ranks that call `save` wait for a late rank as long as they see it compute,
            and 25 seconds for a rank that does not compute (set ZEROFN_TOGETHER_TIMEOUT in the environment to change
            this).

    Examples:
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
    return write_checkpoint(directory, state, wait)


def write_checkpoint(
    directory: str | os.PathLike,
    state: State | Optimizer,
    wait: bool,
    more: Callable[[Group], dict[str, Any]] = lambda group: {},
    then: Callable[[Group], None] | None = None,
) -> Saving | None:
    """As `save`, with the entries of `more(group)` in the manifest.

    `then(group)` is called once the manifest is in place. No rank returns before it has ended on all of them.
    """
    opt = state if isinstance(state, Optimizer) else None
    # The counter of steps is read first, so that a step which begins during this call is noticed.
    check = None if opt is None else check_no_step_since(opt._own.writes)
    groups = None if opt is None else [_as_json(packed(g)) for g in opt._own.groups.to_save()]
    given = state_of(state, "zf.save(directory, {})")
    check = check or check_not_written_since(given)
    path = absolute_path("zf.save({}, state)", directory)
    join_background_threads()
    wait_for_all_ranks("zf.save(directory, state)", given.layout.placement)
    group = checkpoint_group(given.layout.placement, directory)
    buffers = [] if opt is None else buffers_of(opt._own.model)
    header = _header(given, buffers)
    header |= {"param_groups": groups, "buffers": None if opt is None else [e.key for e in buffers], **more(group)}
    if opt is not None:
        opt._own.agree_on_writes()
        opt._own.averages.refuse("zf.save(directory, opt)")
        check_can_be_saved(opt._own.model, buffers)
    try:
        check_replicas(given, group)
    except ValueError:
        check()  # a step in another thread may have caused the difference: then this raises the right error
        raise
    pieces = _pieces(given, buffers if group.rank == 0 else [])
    if not wait:
        pieces, check = copy_to_host(pieces), check_once(check)

    def write() -> None:
        try:
            save_pieces(pieces, path, group, header, check)
        except TimeoutError:
            raise  # the lock was not free in time, and the disk is fine
        except OSError as error:
            raise _disk_error(directory, error) from error
        if then is not None:
            failure = None
            try:
                then(group)
            except OSError as error:
                failure = error
            raise_on_all_ranks(failure, group)

    return write() if wait else Saving(directory, write)


def _pieces(state: State, buffers: list[Entry]) -> dict[str, Any]:
    """The tensors that this rank writes, by name."""
    placement = state.layout.placement
    return {
        saved_name(e, placement.copy if e.owner in placement.apart else None): Piece(
            row_major(e.value), e.offset or 0, e.shape
        )
        for e in [*entries(state), *buffers]
    }


def _header(state: State, buffers: list[Entry]) -> dict[str, Any]:
    """The manifest without the places of tensors in data files.

    Raises:
        TypeError: entries cannot be saved; all are named by path.
    """
    placement = state.layout.placement
    tensors: dict[str, Any] = {}
    own = entries(state)
    sparse = [e for e in own if e.value.layout is not torch.strided]
    bad = [(e.key, f"is of layout {e.value.layout}; keep x.to_dense()") for e in sparse]
    for e in [*own, *buffers]:
        if e.key in tensors:
            bad.append((e.key, "two entries have this name; give the transform another: tx.named('other')"))
        elif e.value.is_meta:
            bad.append((e.key, "is on the meta device and has no data"))
        else:
            about = {"dtype": dtype_name(e.value.dtype), "shape": list(e.shape), **box_order(e)}
            copies = range(placement.copies) if e.owner in placement.apart else [None]
            tensors.update({saved_name(e, copy): about for copy in copies})
    if bad:
        right = "a state of tensors, numbers and text, each under a name of its own"
        raise TypeError(bad_leaves("zf.save: this state cannot be saved", bad, right))
    head = {"zerofn": _version(), "torch": torch.__version__, "ranks": placement.together, "copies": placement.copies}
    if not any("boxes" in about for about in tensors.values()):
        head["version"] = ROW_MAJOR
    return {**head, "values": {}, "tensors": tensors}


def _as_json(group: dict[str, Any]) -> dict[str, Any]:
    """A param_group with numbers in the place of tensors."""
    return tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, group)


def state_of(given: Any, where: str, form: bool = False) -> State:
    """The state itself, or that of an attached model's `opt`.

    Args:
        given: the user's argument.
        where: the call, with `{}` for the argument.
        form: whether only its structure is needed. Then its memory may have been donated, or be half written.

    Raises:
        TypeError: it is neither.
        RuntimeError: a step has taken its memory (`donate=True`), or raised while writing into it.
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
    """An error of the disk, with a message that says which checkpoint is in place."""
    notes = getattr(error, "__notes__", [])
    where = "".join(f" {note}" for note in notes if note.startswith("on rank"))
    fate = "".join(f"; {note}" for note in notes if not note.startswith("on rank"))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    right = "free space; room is needed for the old and the new checkpoint" if full else "another directory"
    message = explain(f"zf.save({str(directory)!r}) could not write{where}", f"{error.strerror or error}{fate}", right)
    return type(error)(error.errno, message) if error.errno else type(error)(message)
