"""Models of transformers, tiny and made from configurations: a causal LM, a vision transformer, T5, and Trainer."""

from __future__ import annotations

import pytest
import torch
from parity import PIPES, Run, compare
from torch import nn

import zerofn as zf

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.0,
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=5,
        qkv_bias=False,  # a bias of keys has no gradient: the softmax does not see it
    )
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=61,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def ids(run: Run, *shape: int) -> torch.Tensor:
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(run.step))


def language(run: Run):
    tokens = ids(run, 3, 12)
    out = run.model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out.logits.float()


def language_checkpointed(run: Run):
    run.model.gradient_checkpointing_enable({"use_reentrant": run.step % 2 == 1})
    run.model.train()
    if run.step % 2:
        run.model.enable_input_require_grads()
    return language(run)


def images(run: Run):
    out = run.model(pixel_values=run.data(4, 3, 16, 16), labels=torch.arange(4))
    out.loss.backward()
    return out["logits"].float()


def translation(run: Run):
    out = run.model(input_ids=ids(run, 3, 9), labels=ids(run, 3, 7))
    out.loss.backward()
    return out.logits.float()


CASES = {
    "llama": (language, llama),
    "checkpointed": (language_checkpointed, llama),
    "vit": (images, vit),
    "t5": (translation, t5),
}


@pytest.mark.parametrize("pipe", ["fp32", "scaled", "bf16", "fp16 dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, pipe: str):
    program, make = CASES[name]
    # Deeper than the models of the other tests; T5 does not scale its attention scores before the exponential,
    # and after one step of this size 16 bits are too few for it.
    exact = pipe in ("fp32", "scaled")
    compare(program, make, pipe, windows=2 if exact else 1, tol=PIPES[pipe].tol * (10 if exact else 6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "vit", "t5"])
def test_bits_of_a_model_cast_by_hand(name: str, dtype: torch.dtype):
    """The same bits as the model in 16 bits with its loss scaled by hand."""
    _, make = CASES[name]
    by_hand, attached = _seeded(make), _seeded(make)
    for p in by_hand.parameters():  # and not the buffers: a rotary table in 16 bits is another table
        p.data = p.data.to(dtype)
    zf.attach(attached, zf.chain(zf.precision(param_dtype=dtype), zf.scale_loss(256.0), zf.sgd(0.1)))
    for model in (by_hand, attached):
        x = Run([model], 0)
        if name == "vit":
            out = model(pixel_values=x.data(4, 3, 16, 16).to(dtype), labels=torch.arange(4))
        else:
            out = model(input_ids=ids(x, 3, 9), labels=ids(x, 3, 9))
        out.loss.backward(torch.full_like(out.loss, 256.0 if model is by_hand else 1.0))
    for (n, p), q in zip(by_hand.named_parameters(), attached.parameters(), strict=True):
        assert torch.equal(p.grad.float() / 256, q.grad), n


def test_generation_in_between():
    model = llama()
    opt = zf.attach(model, zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.scale_loss(64.0), zf.adamw(1e-3)))
    tokens = torch.randint(1, 61, (2, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    made = model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert made.shape == (2, 12)
    loss.backward()
    opt.step()
    assert bool(opt.metrics["updated"])


def test_saved_and_loaded(tmp_path):
    model = llama()
    opt = zf.attach(model, zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.adamw(1e-3)))
    with opt.gathered():
        model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for (n, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), n


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        tokens = torch.randint(1, 61, (10,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("scaled", [False, True])
def test_trainer(tmp_path, scaled: bool):
    """A Hugging Face Trainer takes the adapter and a scheduler of torch's, and trains as with torch.optim."""
    pytest.importorskip("accelerate")
    results = []
    for attached in (True, False):
        torch.manual_seed(0)
        model = llama()
        parts = [zf.scale_loss(128.0)] if scaled else []
        if attached:
            optimizer = zf.attach(model, zf.chain(*parts, zf.adamw(1e-2, weight_decay=0.1)))
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 1 / (1 + e))
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(attached)),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            seed=1,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, args, train_dataset=Data(), optimizers=(optimizer, scheduler))
        trainer.train()
        results.append([p.detach().clone() for p in model.parameters()])
        if attached:
            assert optimizer.global_steps == 4
    start = [p.detach() for p in _seeded(llama).parameters()]
    for a, b, s in zip(*results, start, strict=True):
        assert (a - b).norm() < 1e-3 * (b - s).norm(), "Adam's first steps amplify rounding near zero gradients"


def _seeded(make) -> nn.Module:
    torch.manual_seed(0)
    return make()
