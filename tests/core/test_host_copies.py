"""What a copy beside the computation asks of CUDA, in which order. Without a GPU the calls alone are seen."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerofn as zf
from zerofn.core.offload import CopyQueue  # inside: its copies are replaced by late ones, or counted

HERE = torch.device("cuda", 0)


class FakeTensor:
    """Logs what is done to it."""

    def __init__(self, log: list[Any], name: str, device: str):
        self.log, self.name, self.device = log, name, torch.device(device)
        self.is_cuda = self.device.type == "cuda"

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(("the allocator waits for", stream.name, "before", self.name))

    def copy_(self, source: FakeTensor, non_blocking: bool) -> None:
        assert non_blocking
        self.log.append(("copy", self.name, source.name))


class FakeStream:
    def __init__(self, log: list[Any], name: str):
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: Any) -> None:
        self.log.append((self.name, "waits for", event.name))

    def record_event(self) -> Any:
        self.log.append((self.name, "records"))
        return SimpleNamespace(
            name="the event", synchronize=lambda: self.log.append(("host", "waits for", "the event"))
        )


@pytest.fixture
def log(monkeypatch) -> list[Any]:
    found: list[Any] = []
    computing, copying = FakeStream(found, "compute"), FakeStream(found, "copies")

    @contextmanager
    def stream(s: FakeStream):
        found.append(("on", s.name))
        yield
        found.append(("off", s.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return found


@pytest.mark.parametrize("there", [True, False])
def test_a_copy_waits_for_what_was_computed_and_keeps_memory_until_the_device_has_waited(log, there):
    host, device = FakeTensor(log, "host's", "cpu"), FakeTensor(log, "device's", "cuda:0")
    pair: Any = (device, host) if there else (host, device)
    copy = CopyQueue(HERE).copy([pair])
    assert log == [
        ("copies", "waits for", "compute"),
        ("on", "copies"),
        ("copy", pair[0].name, pair[1].name),
        ("off", "copies"),
        ("copies", "records"),
    ]
    log.clear()
    assert copy.pairs == [pair]
    copy.wait_on_device()
    assert log == [("compute", "waits for", "the event")] and not copy.pairs
    copy.wait_on_host()
    assert log[1:] == [("host", "waits for", "the event")]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("dropped", [True, False])
def test_a_copy_that_nobody_waits_for_leaves_its_memory_to_the_allocator(log, there, dropped):
    """The host's memory is pinned, and its allocator knows of each copy."""
    host, device = FakeTensor(log, "host's", "cpu"), FakeTensor(log, "device's", "cuda:0")
    pair: Any = (device, host) if there else (host, device)
    copy = CopyQueue(HERE).copy([pair])
    log.clear()
    if not dropped:
        copy.release()
        assert not copy.pairs
    del copy
    assert log == [("the allocator waits for", "copies", "before", "device's")]


def test_elsewhere_copies_are_made_at_once():
    target, source = torch.zeros(2), torch.ones(2)
    copy = CopyQueue(torch.device("cpu")).copy([(target, source)])
    assert torch.equal(target, source)
    copy.wait_on_device()
    copy.wait_on_host()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_from_a_gpu_gives_the_same_bits(dtype, in_backward):
    """Large enough leaves that copies take longer than updates."""

    def train(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).cuda()
        adam = zf.low_precision_adam(1e-3) if dtype is torch.bfloat16 else zf.adamw(1e-3)
        opt = zf.attach(model, zf.chain(zf.precision(store_dtype=dtype), wrap(adam)), in_backward=in_backward)
        for i in range(5):
            x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(i)).cuda().to(dtype)
            model(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        state = opt.state
        moments = [x for t in state.transforms.values() for s in t.values() if isinstance(s, dict) for x in s.values()]
        if wrap is zf.offload:
            assert all(x.is_pinned() for x in moments if x.ndim)
        return [x.cpu() for x in [*state.leaves.values(), *moments]]

    offloaded, plain = train(zf.offload), train(lambda t: t)
    assert all(torch.equal(a, b) for a, b in zip(offloaded, plain, strict=True))
