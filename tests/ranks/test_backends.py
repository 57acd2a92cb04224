"""Which backend a group is opened with: gloo for numbers of the host, also beside NCCL."""

import pytest
import torch
import torch.distributed as dist

from zerofn.ranks import backend  # inside: the collectives below, of one process and of several


@pytest.fixture
def opened(monkeypatch):
    """The backends that groups were opened with, on ranks of a job whose default group is `config`."""
    found = []

    def of(config, gloo=True):
        monkeypatch.setattr(dist, "get_backend_config", lambda: config)
        monkeypatch.setattr(dist, "is_gloo_available", lambda: gloo)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "new_group", lambda ranks, backend=None: found.append(backend))
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


def test_nccl_alone_in_a_torch_without_gloo_is_refused(opened):
    found = opened("cuda:nccl", gloo=False)
    with pytest.raises(RuntimeError, match="a torch that is built without gloo"):
        backend.make_group([0, 1], torch.device("cpu"))
    assert found == []
