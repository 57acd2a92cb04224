"""What is said of a function that is refused for a sharded tensor; `of` is the `Origin` of that tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from .._errors import explain

if TYPE_CHECKING:
    from .gathering import Origin

ATTACH_ANEW = "opt.detach() before model.to(...) and zf.attach after it; with opt.gathered(): p.copy_(values)"


def _refuse(wrong: str, why: str, right: str) -> NoReturn:
    raise RuntimeError(explain(wrong, why, right))


def refuse_gather_in_backward(asked: str, of: Origin) -> NoReturn:
    _refuse(
        f"{asked} of {of}",
        "the whole of it is gathered, for which ranks would wait for each other: in the middle of\n"
        "backward one of them may never come to it",
        'opt.metrics["grad_norm"] after opt.step(), which is that of the whole; or it after backward;\n'
        "zf.clip_by_global_norm(max_norm), or a zf.leafwise function of whole gradients, in the chain\n"
        "x.to_local() for this rank's rows by themselves",
    )


def refuse_argument(of: Origin) -> NoReturn:
    _refuse(
        f"an autograd.Function that is given {of}",
        "under shard its gradient is sharded, and the function's backward would give that of the whole",
        "Function.apply(x, p.clone()): the whole, at every stage; where a library calls it (gpytorch),\n"
        "zf.attach of a module whose forward calls that model: inside of a call parameters are whole",
    )


def refuse_old_graph(since: str) -> NoReturn:
    _refuse(
        f"backward through a graph from before {since}",
        "its gradients have other sizes than the parameters have now",
        f"all backwards of a graph before {since}, or the forward again after it",
    )


def refuse_set(of: Origin) -> NoReturn:
    """Refuse what exchanges a tensor's memory, as parametrizations with a `right_inverse` do."""
    right = "x.copy_(y); p.grad = y; p.data = y"
    if of.whole is not None:
        right = "torch.nn.utils.parametrize and parametrizations before zf.attach, or after opt.detach();\n"
        right += "to write values alone, with torch.no_grad(): p.copy_(x)"
    why = "it gives the tensor other memory, and under shard the optimizer updates the present memory"
    _refuse(f"x.set_(y) of {of}", why, right)


def refuse_memory(of: Origin) -> NoReturn:
    """Refuse a function that exposes memory: its caller would take this rank's rows for the full tensor."""
    _refuse(
        f"saving {of}, or giving its memory to another library or process",
        "its tensors are this rank's shards",
        "with opt.gathered(): torch.save(model.state_dict(), file), on every rank\n"
        "with opt.gathered(): shared = copy.deepcopy(model).share_memory(), a copy for other processes\n"
        "dcp.async_save(get_model_state_dict(model), ...): of torch.distributed.checkpoint, on every rank\n"
        "zf.export_safetensors(path, opt.state), or zf.save(directory, opt) to go on from\n"
        "x.full_tensor() for the whole, on every rank; x.to_local() for this rank's rows by themselves",
    )


def refuse_fully_shard(of: Origin) -> NoReturn:
    """Refuse `fully_shard` before it shards a parameter. Its own error would be one of meshes."""
    _refuse(
        "fully_shard(model) after zf.attach(model, tx)",
        f"shard has sharded the parameter {of.leaf.path} already, and FSDP2 would shard its rows once more",
        "fully_shard(block) of each block and fully_shard(model) first, then zf.attach(model, tx) with a tx\n"
        "without shard; or zf.attach(model, zf.chain(zf.shard(), ...)) alone, which replaces fully_shard",
    )


def refuse_other_data(of: Origin, got: Any, has: Any) -> NoReturn:
    wrong = f"other data for {of}: {got.dtype} on {got.device} in place of {has.dtype} on {has.device}"
    why = "under shard it holds this rank's rows, in the dtype and on the device it was attached with"
    _refuse(wrong, why, ATTACH_ANEW)


def refuse_other_shape(how: str, of: Origin, got: Any, shape: tuple[int, ...]) -> NoReturn:
    why = f"it is of the whole's shape, {tuple(shape)}, as at any other stage"
    _refuse(f"{how} of shape {tuple(got.shape)} for {of}", why, "a tensor of that shape")


def refuse_dtensor(name: str, of: Origin, shape: tuple[int, ...], x: Any, why: str | None) -> NoReturn:
    lies = f"over ranks {x.device_mesh.mesh.tolist()} as {', '.join(map(str, x.placements))}"
    _refuse(
        f"{name} of {of}, {tuple(shape)}, and a DTensor of shape {tuple(x.shape)} {lies}",
        f"it has {why}" if why is not None else "it is cut otherwise, or a graph is recorded of it",
        "x.redistribute(p.device_mesh, p.placements), or x.full_tensor(), on every rank of the DTensor",
    )


def refuse_write(name: str, of: Origin) -> NoReturn:
    why = "autograd would have to record the write, and only this rank's rows are stored"
    _refuse(f"{name} of {of}, which requires grad", why, f"with torch.no_grad(): x.{name}(...)")


def refuse_list(name: str, of: Origin) -> NoReturn:
    _refuse(
        f"{name} into {of} and others",
        "under shard each tensor is a shard, and zerofn does not know what this function does to a list of shards",
        'a transform in the chain of zf.attach; for torch.amp.GradScaler, zf.scale_loss("dynamic")',
    )


def refuse_lent(name: str) -> NoReturn:
    _refuse(
        f"{name} of a view of what was gathered",
        "p.grad[index], p.data.T and opt.state[p][name][index] of a shard are made of all ranks' shards,\n"
        "and what is written into them would be lost",
        "p.grad[index] = new, or x[index] = x[index] + 1 in place of x[index] += 1, on every rank;\n"
        "x.clone() for a tensor of one's own; for torch.optim.Muon, zf.muon(lr) in the chain of zf.attach",
    )


def refuse_operator(name: str, of: Origin) -> NoReturn:
    raise NotImplementedError(
        explain(
            f"{name} of {of}, below autograd",
            "it was not called by a function of torch, and on this rank's rows it would give another result",
            "x.full_tensor(), which every rank calls; x.to_local() for this rank's rows by themselves",
        )
    )
