"""Fused language models of transformers against their own loss: value, gradients, auxiliary losses, and the Trainer's numbers."""

import copy
import dataclasses
import functools
import io
import logging

import pytest
import torch
import torch.nn.functional as F
from processes import run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip("transformers")

from lossforge.integrations import transformers as ours  # noqa: E402
from lossforge.patch.patching import IntegrationError, once  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"vocab_size": 53, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
MODELS = {
    "Llama": ({}, 1.0, None),
    "Gemma2": ({"head_dim": 8, "final_logit_softcapping": 3.0}, 1.0, 3.0),
    "Gemma3": ({"head_dim": 8, "final_logit_softcapping": 2.0}, 1.0, 2.0),
    "Qwen3": ({"head_dim": 8}, 1.0, None),
    "Qwen3Moe": ({"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, **EXPERTS}, 1.0, None),
    "Mixtral": ({"num_local_experts": 4, **EXPERTS}, 1.0, None),
    "Granite": ({"logits_scaling": 8.0}, 0.125, None),
    "Cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "Olmo2": ({}, 1.0, None),
    "Phi": ({"hidden_dropout": 0.0}, 1.0, None),
    "Phi3": ({}, 1.0, None),
    "HyperCLOVAX": ({"logits_scaling": 0.3}, 0.3, None),
}


def make(name, **changes):
    torch.manual_seed(0)
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    named = f"{name}Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{named}Config")(**SIZES | TOKENS | MODELS[name][0] | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def vision_language_model():
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**SIZES, **TOKENS),
        image_token_index=52,
        image_token_id=52,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).train()


def batch():
    tokens = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def trained(model, given):
    """Return the outputs of one call and the gradients of all parameters, under an upstream gradient other than 1."""
    model.zero_grad()
    output = model(**given)
    (output.loss * 1.7).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model, given):
    theirs, expected = trained(model, given)
    with ours.fuse(model):
        found, gradients = trained(model, given)
        assert found.logits is None
    torch.testing.assert_close(found.loss, theirs.loss, rtol=1e-5, atol=0, check_dtype=False)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    again, _ = trained(model, given)
    torch.testing.assert_close(again.loss, theirs.loss, rtol=0, atol=0)
    assert again.logits is not None
    return found, theirs


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name):
    model = make(name)
    with ours.fuse(model):
        how = model.get_output_embeddings().how
        assert how.scale == pytest.approx(MODELS[name][1], rel=1e-6)
        assert how.softcap == MODELS[name][2]
    found, theirs = compare(model, batch())
    if (aux := getattr(theirs, "aux_loss", None)) is not None:
        assert aux > 0
        torch.testing.assert_close(found.aux_loss, aux, rtol=0, atol=0)


@pytest.mark.parametrize(
    "given", [{"num_items_in_batch": torch.tensor(31)}, {"num_items_in_batch": 5}, {"ignore_index": 7}, {"shift_labels": 0}], ids=str
)
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_what_a_trainer_passes_counts(name, given):
    inputs = batch()
    if "ignore_index" in given:
        inputs["labels"][inputs["labels"] == -100] = 7
    if "shift_labels" in given:
        given = {"shift_labels": inputs["labels"].roll(-2, 1)}
    compare(make(name), {**inputs, **given})


def test_a_vision_language_model():
    inputs = batch()
    inputs["input_ids"][:, :4] = 52
    compare(vision_language_model(), {**inputs, "pixel_values": torch.randn(2, 3, 8, 8)})


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": 5}, {"ignore_index": 7}, {"shift_labels": torch.tensor(-100)}], ids=str)
def test_a_model_of_masked_tokens(given):
    """Its own loss does not read shift_labels."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes, pad_token_id=0, sparse_prediction=False)).train()
    inputs = batch()
    if "ignore_index" in given:
        inputs["labels"][inputs["labels"] == -100] = 7
    if "shift_labels" in given:
        given = {"shift_labels": inputs["labels"].roll(-2, 1)}
    compare(model, {**inputs, **given})


def test_logits_come_in_eval_without_labels_and_where_asked_for():
    model, inputs = make("Gemma2"), batch()
    expected = model(**inputs)
    ours.fuse(model)
    unlabelled = {name: t for name, t in inputs.items() if name != "labels"}
    for found in (model(**unlabelled), model(**inputs, skip_logits=False), model.eval()(**inputs)):
        torch.testing.assert_close(found.logits, expected.logits)
    assert model(**inputs, skip_logits=True).logits is None
    assert model.train()(**inputs).logits is None


def test_options_are_those_of_the_loss():
    model, inputs = make("Llama"), batch()
    logits = model(**inputs).logits
    counts = inputs["labels"][:, 1:] != -100
    expected = model(**inputs).loss + 0.1 * logits[:, :-1].logsumexp(-1)[counts].square().mean()
    with ours.fuse(model, z_loss=0.1):
        torch.testing.assert_close(model(**inputs).loss, expected)


def test_a_fused_model_is_copied_saved_and_compiled(tmp_path):
    model, inputs = make("Gemma2"), batch()
    ours.fuse(model)
    expected, gradients = trained(model, inputs)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        found, its = trained(other, inputs)
        torch.testing.assert_close((found.loss, its), (expected.loss, gradients), rtol=0, atol=0)
        assert other.get_output_embeddings() is not model.get_output_embeddings()
    model.save_pretrained(tmp_path)
    assert '"Gemma2ForCausalLM"' in (tmp_path / "config.json").read_text()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()(**inputs)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    explained = torch._dynamo.explain(model)(**inputs)
    assert explained.graph_break_count == 0
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_logits_of_a_fused_model_are_not_rounded(compiled, monkeypatch):
    """In bfloat16 where no kernel runs, with logits of a standard deviation above 10, the loss of the same hidden states in float64."""
    monkeypatch.setattr("lossforge.losses.base.state.TRITON", False)
    model, inputs = make("Llama").bfloat16(), batch()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(400)
        x = model.model(**{name: t for name, t in inputs.items() if name != "labels"}).last_hidden_state.double()
    z = x @ model.get_output_embeddings().weight.double().t()
    assert z.std() > 10
    right = F.cross_entropy(z[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    ours.fuse(model)
    torch._dynamo.reset()
    run_as = torch.compile(model, backend="aot_eager") if compiled else model
    assert abs(run_as(**inputs).loss.double() / right - 1) < 1e-5


def test_checkpointing_calls_the_head():
    model, inputs = make("Llama"), batch()
    expected = trained(model, inputs)
    model.gradient_checkpointing_enable()
    calls = []
    ours.fuse(model)
    model.get_output_embeddings().register_forward_hook(lambda module, given, output: calls.append(output))
    found = trained(model, inputs)
    torch.testing.assert_close((found[0].loss, found[1]), (expected[0].loss, expected[1]), rtol=1e-4, atol=1e-6)
    assert len(calls) == 1
    assert calls[0].requires_grad


def test_adapters_that_come_later_count(caplog):
    peft = pytest.importorskip("peft")
    model, inputs = make("Llama"), batch()
    ours.fuse(model)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    logits = adapted.eval()(**inputs).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    torch.testing.assert_close(adapted.train()(**inputs).loss, expected)
    assert "its head is a peft.tuners.lora.layer.Linear now" in caplog.text


def test_a_peft_model_is_fused_within():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("Llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    compare(model, batch())


class Doubling(transformers.LlamaForCausalLM):
    """A model that does to logits what neither a scale nor a softcap is."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state) + 1.5
        return transformers.modeling_outputs.CausalLMOutputWithPast(self.loss_function(logits, labels, 53), logits)


class OwnLoss(transformers.LlamaForCausalLM):
    """A model that does not call its loss_function."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
        )


class Zeroing(transformers.LlamaForCausalLM):
    """A model whose logits are 0."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = 0.0 * self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return transformers.modeling_outputs.CausalLMOutputWithPast(self.loss_function(logits, labels, 53), logits)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Doubling, r"does something else: 0 → 1\.5, 1 → 2\.5"),
        (Zeroing, r"does something else: 0 → 0, 1 → 0"),
        (OwnLoss, r"this model computes its loss itself$"),
    ],
    ids=["offset", "zero", "loss"],
)
def test_a_model_that_does_more_to_its_logits_is_refused(kind, said):
    model = kind(transformers.LlamaConfig(**SIZES, **TOKENS)).train()
    with pytest.raises(TypeError, match=said):
        ours.fuse(model)
    assert type(model) is kind
    assert type(model.lm_head) is nn.Linear
    assert not {"_loss_function"} & vars(model).keys()
    assert "forward" not in vars(model.model)
    model(**batch()).loss.backward()


def test_models_that_compute_their_loss_themselves_are_named():
    sizes = {"vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bart = transformers.BartConfig(vocab_size=53, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)
    for model in (
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sizes, embedding_size=8)),
        transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes)),
        transformers.BartForCausalLM(bart),
        transformers.ProphetNetForCausalLM(transformers.ProphetNetConfig(vocab_size=53, hidden_size=16, num_decoder_layers=1)),
    ):
        name = type(model).__name__
        with pytest.raises(TypeError, match=rf"^{name} cannot be fused: .* self\.loss_function, and this model computes its loss itself$"):
            ours.fuse(model)


def test_a_layer_between_body_and_head():
    sizes = {"vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ElectraConfig(**sizes, embedding_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    compare(transformers.ElectraForCausalLM(config).train(), batch())


def test_a_vocabulary_of_three_tokens():
    """Fewer than the logits by which the scale is measured."""
    model = make("Granite", vocab_size=3, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    inputs = batch()
    compare(model, {**inputs, "input_ids": inputs["input_ids"] % 3, "labels": inputs["labels"].clamp(max=2)})


def test_a_model_without_memory_is_fused():
    """As FSDP makes large ones: on the meta device, and filled later."""
    expected, inputs = make("Granite"), batch()
    with torch.device("meta"):
        model = transformers.GraniteForCausalLM(expected.config)
    ours.fuse(model)
    model.to_empty(device="cpu").load_state_dict(expected.state_dict())
    model.model.rotary_emb = copy.deepcopy(expected.model.rotary_emb)
    assert model.get_output_embeddings().how.scale == 0.125
    torch.testing.assert_close(trained(model.train(), inputs)[1], trained(expected, inputs)[1], rtol=1e-4, atol=1e-6)


def test_fusing_twice_is_harmless():
    model, inputs = make("Granite"), batch()
    expected = trained(model, inputs)
    first, second = ours.fuse(model, z_loss=0.1), ours.fuse(model)
    found = trained(model, inputs)
    torch.testing.assert_close((found[0].loss, found[1]), (expected[0].loss, expected[1]), rtol=1e-4, atol=1e-6)
    second.undo()
    first.undo()
    assert type(model) is transformers.GraniteForCausalLM
    assert type(model.lm_head) is nn.Linear
    torch.testing.assert_close(trained(model, inputs)[1], expected[1], rtol=0, atol=0)


def test_what_cannot_be_fused_is_named():
    model = make("Llama")
    for name in ("loss_function", "ForCausalLMLoss"):  # of the user

        def own(*args, **kwargs):
            return torch.zeros(())

        own.__name__ = own.__qualname__ = name
        model.loss_function = own
        with pytest.raises(TypeError, match=rf"knows ForCausalLMLoss and .*; the model's loss is .*test_transformers\.{name}$"):
            ours.fuse(model)
    model = make("Llama")
    model.lm_head.register_forward_hook(lambda *args: None)
    with pytest.raises(TypeError, match="a head without hooks"):
        ours.fuse(model)
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Linear as head, got builtins\.NoneType"):
        ours.fuse(nn.Linear(2, 2))


def test_the_log_says_what_was_measured(caplog):
    with caplog.at_level(logging.INFO, "lossforge.integrations"):
        ours.fuse(make("Granite"))
    assert "GraniteForCausalLM computes its loss without logits, scale 0.125" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_of_logits_is_theirs(dtype):
    logits = torch.randn(2, 9, 53, dtype=dtype)
    inputs = batch()
    for given in (
        {},
        {"num_items_in_batch": torch.tensor(31)},
        {"num_items_in_batch": 31},
        {"ignore_index": 7},
        {"shift_labels": inputs["labels"].roll(3, 1)},
    ):
        results = []
        labels = inputs["labels"].clamp(given.get("ignore_index", -100))
        for function in (transformers.loss.loss_utils.ForCausalLMLoss, ours.loss_function):
            x = logits.clone().requires_grad_()
            loss = function(x, labels, vocab_size=53, **given)
            (loss * 1.7).backward()
            results.append((loss.detach(), x.grad))
        torch.testing.assert_close(
            results[1], results[0], rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=1e-6
        )  # the interpreter truncates bf16


def test_the_loss_of_logits_is_compiled_with_its_comparison(monkeypatch):
    monkeypatch.setattr(ours, "_check", once("transformers", ours.TESTED, ours.STANDS_FOR))
    compiled = torch.compile(functools.partial(ours.loss_function, vocab_size=53), backend="aot_eager", fullgraph=True)
    x, labels = torch.randn(2, 9, 53), batch()["labels"]
    torch.testing.assert_close(compiled(x, labels), ours.loss_function(x, labels, 53))
    torch._dynamo.reset()
    changed = [dataclasses.replace(each, signature="(logits)") for each in ours.STANDS_FOR[:1]]
    monkeypatch.setattr(ours, "_check", once("transformers", ours.TESTED, changed))
    for call in (lambda: ours.loss_function(x, labels, 53), lambda: ours.fuse(make("Llama"))):
        with pytest.raises(IntegrationError, match=r"ForCausalLMLoss takes \(logits, labels, .*\), tested with \(logits\)"):
            call()


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fake tensors of a second GPU need two, or none")
def test_the_number_of_items_may_be_on_another_device():
    with FakeTensorMode():
        logits, labels = torch.empty(2, 9, 53, device="cuda:1"), torch.zeros(2, 9, dtype=torch.int64, device="cuda:0")
        found = ours.loss_function(logits, labels, vocab_size=53, num_items_in_batch=torch.ones((), device="cuda:0"))
    assert found.device == torch.device("cuda:1")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_trainers_numbers_are_its_own(processes, tmp_path):
    """One and two processes, accumulation 1 and 4, uneven labels, three architectures."""
    printed = run("trainer_runs.py", processes=processes, folder=tmp_path)
    assert printed.count("every number is that of the model's own loss") == processes
