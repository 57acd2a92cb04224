"""Which backend a group is opened with: gloo for numbers of the host, also beside NCCL."""

import pytest
import torch
import torch.distributed as dist
from time_limits import limit
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf
from zerofn.ranks import backend, process_groups  # inside: how groups are opened below the calls that need them


@pytest.fixture
def opened(monkeypatch):
    """The backends that groups were opened with, on ranks of a job whose default group is `config`."""
    found = []

    def of(config, gloo=True):
        monkeypatch.setattr(dist, "get_backend_config", lambda: config)
        monkeypatch.setattr(dist, "is_gloo_available", lambda: gloo)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "new_group", lambda ranks, backend=None: found.append(backend))
        monkeypatch.setattr(backend, "make_by_members", lambda library, name, ranks, backend: found.append(name))
        return found

    return of


@pytest.mark.parametrize(
    ("config", "device", "kind"),
    [
        ("cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", None),
        ("cpu:gloo", "cpu", None),
        ("cpu:mpi", "cpu", None),
    ],
)
def test_numbers_of_the_host_go_over_gloo(opened, config, device, kind):
    found = opened(config)
    backend.make_group([0, 1], torch.device(device))
    assert found == [kind]


class Bound:
    """A default group that is bound to a GPU, whose communicator torch splits."""

    bound_device_id: torch.device | None = torch.device("cuda", 0)


def test_a_group_of_the_host_is_not_split_from_one_of_gpus(opened, monkeypatch):
    """torch splits the communicator on ranks outside of a new group alone, where that is of gloo: they would hang."""
    opened("cuda:nccl")
    world, seen = Bound(), []
    monkeypatch.setattr(backend, "default_group", lambda: world)
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend: seen.append(world.bound_device_id))
    for device in ("cpu", "cuda"):
        backend.make_group([0, 1], torch.device(device))
    assert seen == [None, torch.device("cuda", 0)] and world.bound_device_id == torch.device("cuda", 0)


def test_the_first_group_of_gpus_is_bound_to_one_so_that_others_are_split(monkeypatch):
    given: dict = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    for name, x in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(x))
    monkeypatch.setattr(backend._stores, "FileStore", lambda file, count: None)
    store = backend._stores.HashStore()
    monkeypatch.setattr(backend._stores, "PrefixStore", lambda prefix, _: store)
    for kind, device in (("cpu:gloo,cuda:nccl", torch.device("cuda", 1)), ("gloo", None)):
        given.clear()
        store.set("zerofn/backend", kind)
        backend.make_default(kind, "file", "first")
        assert (given["backend"], given.get("device_id"), given["rank"]) == (kind, device, 1)


def test_ranks_that_would_open_other_backends_are_refused():
    """They would wait for each other for ever: one machine of the job has no GPUs."""
    store = backend._stores.HashStore()
    backend._compare("cpu:gloo,cuda:nccl", 0, store)
    backend._compare("cpu:gloo,cuda:nccl", 1, store)
    with pytest.raises(RuntimeError, match="rank 2 would open gloo, and rank 0 cpu:gloo,cuda:nccl"):
        backend._compare("gloo", 2, store)


@pytest.mark.parametrize(
    ("config", "devices", "unsent"),
    [
        ("cuda:nccl", {"cpu"}, {"cpu": "cuda"}),
        ("cuda:nccl", {"cuda"}, {}),
        ("cpu:gloo,cuda:nccl", {"cpu", "cuda"}, {}),
        ("cpu:gloo,cuda:gloo", {"cuda"}, {}),
        ("cuda:nccl", set(), {}),
    ],
)
def test_parameters_that_a_backend_does_not_send_are_found(opened, config, devices, unsent):
    opened(config)
    assert backend.not_sent_from(devices) == unsent


def on_other_devices() -> str:
    """What a rank hears whose model is on the CPU while that of another rank is on a device."""
    import other_device

    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(2, 2)
    if dist.get_rank() == 1:
        KEPT.extend(other_device.register())
        model = other_device.move(model)
    try:
        zf.attach(model, zf.chain(zf.all_reduce(), zf.sgd(0.1)))
    except ValueError as error:
        return str(error)
    return "attached"


KEPT: list = []


def test_a_world_whose_devices_differ_is_refused():
    told = zf.launch(on_other_devices, 2, timeout=limit())
    assert told[0] == told[1] and told[0].startswith("parameters on devices of several kinds: rank 0 has 'cpu', rank 1")


ROWS = [tuple(range(i, i + 8)) for i in range(0, 1024, 8)]


@pytest.mark.parametrize(
    ("rows", "bound", "device", "calls"),
    [
        (ROWS, False, "cpu", 1),
        (ROWS, True, "cuda", 1),
        # A rank outside of all rows is to take part in each split.
        (ROWS[:-1], True, "cuda", 127),
        (ROWS[:-1], True, "cpu", 1),
        ([tuple(range(1024))], True, "cuda", 1),
    ],
)
def test_a_rank_opens_its_own_row_alone(opened, monkeypatch, rows, bound, device, calls):
    found = opened("cpu:gloo,cuda:nccl")
    monkeypatch.setattr(backend, "default_group", lambda: Bound() if bound else object())
    monkeypatch.setattr(backend, "world", lambda: (13, 1024))
    process_groups._open_all(rows, torch.device(device), "test", 3)
    assert len(found) == calls
    assert calls > 1 or len(rows) == 1 or found[0].endswith("_3_8")


def attached_to_a_mesh() -> list[tuple[int, float]]:
    """Calls that open groups, and a sum of parameters after a step, in several attachments to a mesh of two axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    rank, calls = dist.get_rank(), [0]
    if rank < 2:
        # One that some ranks alone are in. From torch 2.14 on its own names differ from here on.
        dist.new_group([0, 1], use_local_synchronization=True)
    if torch.__version__ >= "2.14":
        with pytest.raises(
            RuntimeError, match=r"(?s)rank 3 .* after \d groups of torch\.distributed.*dist\.new_group on"
        ):
            zf.attach(torch.nn.Linear(4, 4), zf.chain(zf.shard(), zf.sgd(1e-2)))
        if rank >= 2:
            dist.new_group([2, 3], use_local_synchronization=True)

    def counted(made):
        def count(*args, **options):
            calls[0] += 1
            return made(*args, **options)

        return count

    dist.new_group, backend.make_by_members = counted(dist.new_group), counted(backend.make_by_members)
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        tx = zf.chain(zf.shard(mesh["node"]), zf.all_reduce(mesh["nodes"]), zf.adamw(1e-2))
        calls[0], opt = 0, zf.attach(model, tx)
        model(torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
        opt.step()
        opt.detach()
        found.append((calls[0], float(sum(p.detach().sum() for p in model.parameters()))))
    return found


def test_groups_of_rows_are_opened_again_and_again():
    """Each time under names that no group had, whatever groups the user has opened for some ranks."""
    found = zf.launch(attached_to_a_mesh, 4, timeout=limit())
    assert found == [found[0]] * 4 and found[0] == [found[0][0]] * 3 and found[0][0][0] <= 8


def test_nccl_alone_in_a_torch_without_gloo_is_refused(opened):
    found = opened("cuda:nccl", gloo=False)
    with pytest.raises(RuntimeError, match="a torch that is built without gloo"):
        backend.make_group([0, 1], torch.device("cpu"))
    assert found == []
