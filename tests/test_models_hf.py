"""Hugging Face checkpoints: references computed by transformers, round trips, refused files."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen3_oracle
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, DENSE, MOE, build, parameters, sequences

import jaxfp4
from models import Qwen3, Qwen3Config, load_hf, save_hf
from models.hf_checkpoint import CheckpointError, named_tensors, tensor_map

POLICY = jaxfp4.Policy()
TINY = ("dense", "dense-tied", "moe")


def load_fp32(folder):
    return load_hf(folder, POLICY, dtype=jnp.float32)


@jax.jit(static_argnums=0)
def loss_and_gradients(graphdef, state, tokens, start, end):
    """Mean negative log-probability of tokens[:, 1:], its parts, and its gradients."""

    def loss(state):
        model = nnx.merge(graphdef, state)
        output = model(tokens, start=start, end=end)
        logprob, _ = model.token_logprob(output.hidden[:, :-1], tokens[:, 1:])
        return -logprob.mean(), (logprob, model.logits(output.hidden), output.routes)

    return jax.value_and_grad(loss, has_aux=True)(state)


@jax.jit(static_argnums=0)
def next_token(graphdef, state, tokens, cache, offset):
    model = nnx.merge(graphdef, state)
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    output = model(
        tokens,
        start=start,
        end=start + offset + tokens.shape[1],
        cache=cache,
        offset=offset,
    )
    logits = model.logits(output.hidden[:, -1])
    return jnp.argmax(logits, -1).astype(jnp.int32), output.cache


@pytest.fixture(scope="module", params=TINY)
def case(request, shared_data):
    """A checkpoint: its model split in two, what transformers computed from it, its folder."""
    folder = shared_data / "hf-tiny" / request.param
    with jax.numpy_dtype_promotion("strict"):
        model = load_fp32(folder)
    return nnx.split(model, nnx.Param), load_file(folder / "reference.safetensors"), folder


def test_logits_and_gradients_equal_transformers(case):
    (graphdef, state), reference, folder = case
    tokens = jnp.asarray(reference["input_ids"], jnp.int32)
    rows, length = tokens.shape
    start, end = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
    (loss, (logprob, logits, routes)), gradients = loss_and_gradients(
        graphdef, state, tokens, start, end
    )
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logprob, reference["token_logprobs"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, reference["mean_nll"][0], rtol=0, atol=1e-4)

    config = nnx.merge(graphdef, state).config
    expected = json.loads((folder / "reference_grad_norms.json").read_text())
    gradients = jax.tree.map(np.asarray, gradients)
    norms = {
        name: np.linalg.norm(value.reshape(-1))
        for name, value in named_tensors(gradients, config, "fused")
    }
    assert norms.keys() == expected.keys()
    for name, norm in norms.items():
        assert norm == pytest.approx(expected[name], rel=1e-3), name
    for layer in config.moe_layers:
        best = np.argsort(-reference[f"router_logits_{layer}"], axis=-1, kind="stable")
        np.testing.assert_array_equal(
            routes.experts[layer].reshape(rows * length, -1),
            best[:, : config.num_experts_per_tok],
        )

    mask = reference["mask_leftpad"].astype(bool)
    start = jnp.asarray(length - mask.sum(1), jnp.int32)
    (_, (_, logits, _)), _ = loss_and_gradients(graphdef, state, tokens, start, end)
    np.testing.assert_allclose(
        np.asarray(logits)[mask], reference["logits_leftpad"][mask], rtol=0, atol=1e-4
    )


def test_greedy_decoding_equals_transformers(case):
    (graphdef, state), reference, _ = case
    tokens = jnp.asarray(reference["input_ids"], jnp.int32)
    rows, length = tokens.shape
    steps = reference["greedy16"].shape[1]
    cache = nnx.merge(graphdef, state).init_cache(rows, length + steps)
    offset, chosen = jnp.int32(0), []
    for _ in range(steps):
        token, cache = next_token(graphdef, state, tokens, cache, offset)
        offset, tokens = offset + tokens.shape[1], token[:, None]
        chosen.append(token)
    np.testing.assert_array_equal(np.stack(chosen, 1), reference["greedy16"])


def assert_equal_parameters(a, b):
    a, b = parameters(a, a.config), parameters(b, b.config)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_fused_experts_are_the_same_model(shared_data):
    single = load_fp32(shared_data / "hf-tiny" / "moe")
    fused = load_fp32(shared_data / "hf-tiny" / "moe-fused")
    assert_equal_parameters(single, fused)
    tokens, zero = jnp.ones((2, 24), jnp.int32), jnp.zeros(2, jnp.int32)
    runs = [
        loss_and_gradients(*nnx.split(model, nnx.Param), tokens, zero, zero + 24)[0][1][1]
        for model in (single, fused)
    ]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("name", TINY)
def test_both_config_styles(shared_data, name, style):
    folder = shared_data / "hf-tiny" / name
    both = Qwen3Config.from_hf(json.loads((folder / "config.json").read_text()))
    one = Qwen3Config.from_hf(json.loads((folder / f"config.{style}.json").read_text()))
    assert one == both
    assert one.rope_theta == 1_000_000.0
    assert one.num_experts == (8 if name == "moe" else 0)
    assert Qwen3Config.from_hf(one.to_hf()) == one


@pytest.mark.parametrize("experts", ["single", "fused"])
@pytest.mark.parametrize("max_shard_bytes", [200_000, 10**9])
def test_written_back_files_hold_the_same_tensors(shared_data, tmp_path, experts, max_shard_bytes):
    folder = shared_data / "hf-tiny" / ("moe" if experts == "single" else "moe-fused")
    model = load_fp32(folder)
    save_hf(model, tmp_path, experts=experts, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1 if max_shard_bytes < 10**6 else len(files) == 1
    written = {name: value for file in files for name, value in load_file(file).items()}
    original = load_file(folder / "model.safetensors")
    assert written.keys() == original.keys()
    for name, value in written.items():
        assert value.dtype == original[name].dtype
        np.testing.assert_array_equal(value, original[name], err_msg=name)
    assert_equal_parameters(load_fp32(tmp_path), model)
    with pytest.raises(FileExistsError, match="safetensors"):
        save_hf(model, tmp_path)


def transformers_logits(folder, tokens):
    """What transformers computes from a checkpoint in fp32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


@pytest.mark.parametrize("name", [*TINY, "moe-fused"])
def test_written_back_files_load_in_transformers(shared_data, tmp_path, name):
    source = shared_data / "hf-tiny" / name
    save_hf(load_fp32(source), tmp_path)
    reference = load_file(source.parent / name.removesuffix("-fused") / "reference.safetensors")
    logits = transformers_logits(tmp_path, reference["input_ids"])
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_what_the_oracle_does(tmp_path, name):
    config = CONFIGS[name]
    model = build(config, POLICY)
    save_hf(model, tmp_path, dtype=jnp.float32)
    (tokens,) = sequences([13])
    expected = qwen3_oracle.logits(config, parameters(model, config), tokens)
    logits = transformers_logits(tmp_path, tokens[None])[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("experts", ["single", "fused"])
def test_every_parameter_has_exactly_one_tensor(config, experts):
    model = nnx.eval_shape(lambda: build(config, POLICY))
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    written = {path: np.zeros(variable.shape, int) for path, variable in state.items()}
    for part in tensor_map(config, experts):
        written[part.parameter][part.index] += 1
    for path, count in written.items():
        assert (count == 1).all(), path


def test_initial_values():
    model = nnx.jit(lambda: Qwen3(MOE, POLICY, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))()
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = np.asarray(variable[...])
        assert value.dtype == jnp.bfloat16
        if "norm" in path[-1]:
            assert (value == 1).all(), path
        else:
            assert value.astype(np.float32).std() == pytest.approx(MOE.initializer_range, rel=0.1)


def test_qwen2_checkpoint_round_trip(tmp_path):
    config = dataclasses.replace(DENSE, head_dim=16, qk_norm=False, qkv_bias=True)
    model = build(config, POLICY, dtype=jnp.float32)
    save_hf(model, tmp_path, dtype=jnp.float32)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    assert "model.layers.2.self_attn.k_proj.bias" in load_file(tmp_path / "model.safetensors")
    again = load_fp32(tmp_path)
    assert again.config == config
    assert_equal_parameters(again, model)


@pytest.fixture
def editable(shared_data, tmp_path):
    """Copies a checkpoint, its tensors edited by a function, and returns the folder."""

    def copy(name, edit):
        folder = tmp_path / name
        shutil.copytree(shared_data / "hf-tiny" / name, folder, copy_function=shutil.copyfile)
        folder.chmod(0o755)
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return copy


def test_missing_extra_and_misshapen_tensors_are_listed(editable):
    def edit(tensors):
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.2.mlp.gate.weight"] = np.zeros((8, 128), np.float32)
        tensors["model.norm.weight"] = np.zeros(127, np.float32)
        tensors["model.layers.0.mlp.gate.weight"] = np.zeros((8, 128), np.int32)

    with pytest.raises(CheckpointError) as error:
        load_fp32(editable("moe", edit))
    message = str(error.value)
    assert "missing (2): lm_head.weight, model.layers.1.mlp.experts.3.up_proj.weight" in message
    assert "extra (1): model.layers.2.mlp.gate.weight" in message
    assert "misshapen (2): model.layers.0.mlp.gate.weight is I32[8, 128]" in message
    assert "model.norm.weight is F32[127], expected [128]" in message


def test_half_fused_experts_are_refused(editable):
    def edit(tensors):
        for expert in range(8):
            for kind in ("gate", "up", "down"):
                name = f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight"
                del tensors[name]
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((8, 128, 128), np.float32)

    with pytest.raises(CheckpointError, match=r"missing.*layers\.0\.mlp\.experts\.down_proj"):
        load_fp32(editable("moe", edit))


def test_a_tied_checkpoint_may_repeat_its_embedding_as_head_but_have_no_other(editable):
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    same = editable("dense-tied", lambda t: t.update({head: t[embedding]}))
    assert load_fp32(same).lm_head is None
    shutil.rmtree(same)
    other = editable("dense-tied", lambda t: t.update({head: t[embedding][::-1].copy()}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_fp32(other)


def test_an_untied_head_is_its_own(shared_data):
    model = load_fp32(shared_data / "hf-tiny" / "dense")
    assert np.abs(model.lm_head[...] - model.embed_tokens[...]).max() > 0.01


def test_shards_must_be_those_of_the_index(shared_data, tmp_path):
    save_hf(load_fp32(shared_data / "hf-tiny" / "dense"), tmp_path, max_shard_bytes=200_000)
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"disagree.* model\.norm\.weight"):
        load_fp32(tmp_path)
    (tmp_path / shard).unlink()
    with pytest.raises(FileNotFoundError, match=shard):
        load_fp32(tmp_path)


UNSUPPORTED = [
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.*yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*linear"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope_parameters.*llama3"),
    ({"rope_theta": 10_000.0}, "rope_theta.*10000.*rope_parameters.rope_theta.*1000000"),
    ({"rope_theta": None, "rope_parameters": None}, "none of.*rope_theta"),
    ({"num_local_experts": 4}, "num_experts.*8.*num_local_experts.*4"),
    ({"num_experts": None, "num_local_experts": None}, "none of.*num_experts"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"model_type": "llama"}, "model_type='llama'"),
    ({"head_dim": None}, "no head_dim"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED, ids=[m for _, m in UNSUPPORTED])
def test_unsupported_configs_are_refused_by_key_and_value(shared_data, change, message):
    config = json.loads((shared_data / "hf-tiny" / "moe" / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        Qwen3Config.from_hf(config | change)
