"""The recipes of docs/use_with with the real libraries: each page's own code runs, and gives what it gives without lossforge."""

import importlib
import inspect
import os
import pkgutil
import re
import sys

import numpy as np
import pytest
import torch
from pages import ROOT, blocks_of, files_of, run_python, text_of

from lossforge import integrations, losses
from lossforge.losses import FusedLinear, cross_entropy, linear_draft_loss

FOLDER = "docs/use_with"
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
# A mesh or a model holds the process group. A thread of gloo's that lets go of a tensor while Python ends aborts the process.
ENDED = "\n\nimport os, sys\n\nsys.stdout.flush()\nos._exit(0)\n"
FOR_RANKS = {"PYTHONPATH": os.pathsep.join(sys.path)} | ({} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""})
"""NCCL wants a GPU for each process; gloo wants none."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a page's code in an empty folder and return its names; changes take the place of parts of it."""
    monkeypatch.chdir(tmp_path)
    return lambda name, changes=None: run_python(f"{FOLDER}/{name}.md", tmp_path, changes)


def history(trainer, names=("loss", "grad_norm")):
    return {name: [line[name] for line in trainer.state.log_history if name in line] for name in names}


def test_every_page_is_tried():
    tried = {"hugging_face_trainer", "trl", "lightning", "timm", "torchvision_detectors", "torch_compile", "mixed_precision"}
    tried |= {"transformers_detection", "sentence_transformers", "segmentation_models_pytorch", "monai"}
    tried |= {"open_clip", "ultralytics", "rfdetr"}  # the last two beside their integrations: they have no code that runs without data
    tried |= {"ddp", "fsdp2", "dtensor", "cuda_graphs", "activation_checkpointing"}
    tried |= {"segmentation_libraries", "loss_names"}  # in tests of their names
    tried |= {"from_liger", "liger", "verl", "megatron", "torchtitan", "draft_models", "multi_token_prediction"}
    tried |= {"index", "llm_trainers"}  # have no Python code
    assert not [block for name in ("index", "llm_trainers") for block in blocks_of(f"{FOLDER}/{name}.md") if block.language == "python"]
    assert {page.stem for page in (ROOT / FOLDER).glob("*.md")} == tried


def test_the_table_of_stacks_has_every_integration_and_its_version():
    names = {each.name for each in pkgutil.iter_modules(integrations.__path__) if not each.name.startswith("_")}
    rows = [line for line in text_of(f"{FOLDER}/index.md").splitlines() if line.startswith("| ")]
    for name in names:
        (row,) = (row for row in rows if re.search(rf"`(config\.loss = )?{name}\.(patch|fuse|Loss)\b", row))
        tested = getattr(importlib.import_module(f"lossforge.integrations.{name}"), "TESTED", "5.23")
        assert tested in row.split("|")[4], row


def test_hugging_face_trainer(run):
    ours = history(run("hugging_face_trainer")["trainer"])
    assert ours["loss"][-1] < ours["loss"][0] - 0.5
    theirs = history(run("hugging_face_trainer", {"transformers.fuse(model)\n": ""})["trainer"])
    torch.testing.assert_close(ours, theirs, **FLOAT32)


def test_trl(run):
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    found = run("trl", {"trl.patch()": "handle = trl.patch()"})
    with found["handle"] as handle:
        assert handle.active
        ours = history(found["trainer"], names)
    assert not handle.active
    assert ours["loss"][-1] < ours["loss"][0] - 0.5
    theirs = history(run("trl", {"trl.patch()": ""})["trainer"], names)
    assert len(theirs["entropy"]) == 8
    torch.testing.assert_close(ours, theirs, **FLOAT32)


@pytest.mark.slow
def test_hugging_face_trainer_on_two_processes(tmp_path, torchrun):
    """With one micro-batch an update and with four, of unequal numbers of tokens."""
    done = torchrun(ROOT / "tests" / "trainer_worker.py", cwd=tmp_path, **FOR_RANKS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the objective is the model's own") == 1, done.stdout


def test_liger(run):
    functional = pytest.importorskip("liger_kernel.transformers.functional", reason="needs pip install liger-kernel")
    own = functional.liger_cross_entropy
    logits, target = torch.randn(4, 9), torch.arange(4)
    with run("liger")["handle"]:
        assert functional.liger_cross_entropy is not own
        torch.testing.assert_close(functional.liger_cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target))
    assert functional.liger_cross_entropy is own


def test_from_liger(run):
    """Each loss of the page beside the class of Liger that names it, with Liger's defaults: value and gradients."""
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="needs pip install liger-kernel")
    page = run("from_liger")
    hidden, weight, target, frozen, frozen_weight, count = (
        page[name] for name in ("hidden", "weight", "target", "frozen", "frozen_weight", "count")
    )
    policy = hidden, weight, target.clamp(min=0), count.float(), page["advantages"], None, page["reference"], page["old"]
    labels = torch.tensor([True, True, False, False])
    sets = {
        "LigerFusedLinearDPOLoss": (weight, hidden, target, None, frozen, frozen_weight),
        **dict.fromkeys([f"LigerFusedLinear{name}Loss" for name in ("CPO", "SimPO", "ORPO")], (weight, hidden, target)),
        "LigerFusedLinearKTOLoss": (hidden, weight, target, None, labels, frozen, frozen_weight, None, torch.tensor(0.3)),
        "LigerFusedLinearGRPOLoss": policy,
        "LigerFusedLinearJSDLoss": (page["rows"], weight, frozen.flatten(0, 1), frozen_weight, page["labels"]),
    }
    assert sets.keys() == page["losses"].keys()
    for name, given in sets.items():
        more = {"use_ref_model": True} if "KTO" in name else {}
        found = getattr(liger, name)(compiled=False, **more)(*given)
        theirs = found[0] if isinstance(found, tuple) else found
        ours = page["losses"][name]
        torch.testing.assert_close(ours, theirs, **FLOAT32)
        gradients = [torch.autograd.grad(each, (hidden, weight), torch.tensor(1.7), retain_graph=True) for each in (ours, theirs)]
        torch.testing.assert_close(*gradients, **FLOAT32)


def test_the_table_of_ligers_calls_names_what_is_there():
    """Ours in each row's second column are public, with the options that the row names; Liger's in the first are in Liger."""
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="needs pip install liger-kernel")
    liger = [importlib.import_module(f"liger_kernel.transformers{part}") for part in ("", ".functional", ".grpo_loss")] + [chunked]
    text = text_of(f"{FOLDER}/from_liger.md").partition("## Call by call")[2].partition("## Memory")[0]
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 14
    for theirs, ours, _ in rows:
        for name in re.findall(r"`(\w+)", theirs):
            assert any(hasattr(module, name) for module in liger), name
        for name, options in re.findall(r"`(\w+)(?:\(([^`]*)\))?`", ours):
            function = getattr(losses, name)
            taken = inspect.signature(function).parameters
            assert set(re.findall(r"(\w+)=", options)) <= {*taken}, (name, options)


@pytest.mark.slow
def test_the_recipe_from_liger_on_two_processes(tmp_path, torchrun):
    """LoRA, FSDP2 and checkpointing, at a small size: the losses are those of the model's own loss."""
    (script,) = files_of(f"{FOLDER}/from_liger.md").items()
    (tmp_path / script[0]).write_text(script[1] + ENDED, encoding="utf-8")
    printed = []
    for words in ((), ("--own",)):
        done = torchrun(script[0], "--small", *words, cwd=tmp_path, **FOR_RANKS)
        assert done.returncode == 0, done.stderr
        printed.append([float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)])
    assert len(printed[0]) == 5
    assert printed[0][-1] < printed[0][0]
    torch.testing.assert_close(*printed, rtol=1e-5, atol=2e-5)


def test_torchtitan(run):
    wrapper = pytest.importorskip("torchtitan.components.loss", reason="needs pip install torchtitan").ChunkedLossWrapper
    assert isinstance(run("torchtitan")["loss"].build(), wrapper)  # by which the trainer knows that it takes the head


SPECFORGE = """
def linear_draft_loss(x, weight, teacher, kind="lk", teacher_lse=None, loss_weight=None, normalizer=None, outputs=()):
    logits, own = x @ weight.T, teacher.input @ teacher.weight.T
    acceptance = torch.minimum(logits.softmax(-1), (own - teacher_lse.unsqueeze(-1)).exp()).sum(-1)
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), own.softmax(-1), reduction="none").sum(-1)
    share = torch.exp(-3.0 * acceptance.detach())
    each = (share * kl + (1 - share) * (1 - acceptance)) * loss_weight
    return each.sum() / (loss_weight.sum() if normalizer is None else normalizer), acceptance.detach() * (loss_weight != 0)
"""
"""SpecForge's blend with a λ a token, and its acceptance, in plain torch."""


def test_draft_models(run):
    ours = run("draft_models")
    name = ", linear_draft_loss\n"
    theirs = run("draft_models", {name: "\n" + SPECFORGE})
    assert float(ours["accepted"][-1]) > float(ours["accepted"][0]) + 0.1
    for found in ("accepted", "both", "acceptance", "nll", "weights"):
        torch.testing.assert_close(ours[found], theirs[found], **FLOAT32)
    gradients = [names["draft_head"].weight.grad for names in (ours, theirs)]  # of both blocks behind the loop
    torch.testing.assert_close(*gradients, **FLOAT32)
    torch.testing.assert_close(ours["both"], sum(separate(ours)), **FLOAT32)
    logits = torch.randn(1, 6, 150)
    assert ours["lk_hybrid"](logits, logits).abs().max() < 1e-6
    assert ours["per_token"].shape == (1, 6)


def separate(names):
    """The terms of the page's one call of several depths, a call each."""
    for d, states in enumerate(names["depths"]):
        seen = names["seen"][:, d:]
        teacher = names["vocabulary"].teacher(names["teacher_hidden"][:, d:])
        given = {"teacher_lse": names["lse"][:, d:], "loss_weight": seen * names["decay"][d], "normalizer": names["seen"].sum()}
        yield linear_draft_loss(states[:, : 16 - d], names["draft_head"].weight, teacher, **given)


EACH_DEPTH = """
def linear_mtp_loss(hidden, weight, target, depth_weights, outputs):
    losses = [torch.nn.functional.cross_entropy((h @ weight.T).transpose(1, 2), t) for h, t in zip(hidden, target)]
    return sum(w * loss for w, loss in zip(depth_weights, losses)), torch.stack(losses)
"""


def test_multi_token_prediction(run):
    ours, theirs = (
        run("multi_token_prediction"),
        run("multi_token_prediction", {"linear_mtp_loss, mtp_targets\n": "mtp_targets\n" + EACH_DEPTH}),
    )
    assert float(ours["losses"].max()) < 3.0
    for found in (lambda names: names["losses"], lambda names: names["head"].weight.grad):
        torch.testing.assert_close(found(ours), found(theirs), **FLOAT32)


@pytest.mark.parametrize(
    ("page", "module", "name"),
    [
        ("verl", "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),
        ("megatron", "megatron.core.tensor_parallel", "vocab_parallel_cross_entropy"),
    ],
)
def test_patches_of_names(page, module, name, run):
    """What they compute is tried beside the integrations."""
    library = pytest.importorskip(module, reason=f"needs pip install {page}")
    own = getattr(library, name)
    with run(page)["handle"]:
        assert getattr(library, name).__module__ == f"lossforge.integrations.{page}"
    assert getattr(library, name) == own


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": ["body"], "target_parameters": ["head.weight"]}], ids=str)
def test_an_adapter_of_peft_on_a_fused_head(options):
    """It comes after FusedLinear, which keeps the layer inside of it: refused until it is merged."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 16), "head": torch.nn.Linear(16, 50)})
    fused = FusedLinear(cross_entropy, model["head"])
    features, target = torch.randn(4, 16), torch.arange(4)
    plain = fused(features, target)
    torch.testing.assert_close(plain, torch.nn.functional.cross_entropy(model["head"](features), target))
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["head"], "init_lora_weights": False, **options}))
    wanted = torch.nn.functional.cross_entropy(model["head"](features), target)
    assert abs(wanted - plain) > 1e-3
    with pytest.raises(TypeError, match=r"but peft\.tuners\.lora\.layer\.\w+ took its place as 'head'.* merge_and_unload"):
        fused(features, target)
    with pytest.raises(TypeError, match=r"head must be a torch\.nn\.Linear, .*, got peft\.tuners\.lora\.layer\.\w+\. .*merge_and_unload"):
        FusedLinear(cross_entropy, model["head"])
    adapted.merge_and_unload()
    torch.testing.assert_close(fused(features, target), wanted, **FLOAT32)


def test_lightning(run):
    ours = run("lightning")["classifier"].losses
    assert ours[-1] < ours[0] - 0.1
    torchs = {"from lossforge.losses import cross_entropy": "from torch.nn.functional import cross_entropy"}
    theirs = run("lightning", torchs)["classifier"].losses
    torch.testing.assert_close(ours, theirs, **FLOAT32)


def test_timm(run):
    def losses(changes=None):
        np.random.seed(0)  # of timm's Mixup
        found = run("timm", changes)
        if "handle" in found:
            found["handle"].undo()
        return found["losses"]

    ours = losses()
    assert ours[-1] < ours[0] - 0.1
    theirs = losses({"handle = patch()\n": ""})
    assert ours != theirs
    torch.testing.assert_close(ours[:6], theirs[:6], **FLOAT32)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)  # a rounding grows from update to update


def test_torchvision_detectors(run):
    found = run("torchvision_detectors")
    found["handle"].undo()
    detector, gradient = found["detector"], found["fused"].cls_logits.weight.grad
    detector.head.classification_head = found["stock"]
    theirs = detector(found["images"], found["targets"])
    torch.testing.assert_close(found["losses"], theirs, **FLOAT32)
    sum(theirs.values()).backward()
    torch.testing.assert_close(gradient, found["stock"].cls_logits.weight.grad, rtol=1e-3, atol=1e-6)


def test_open_clip(run):
    found = run("open_clip")
    found["handle"].undo()
    image, text = (found[name].detach().requires_grad_() for name in ("image", "text"))
    theirs = found["ClipLoss"]()(image, text, torch.tensor(10.0))
    theirs.backward()
    torch.testing.assert_close(found["loss"], theirs, **FLOAT32)
    torch.testing.assert_close((found["image"].grad, found["text"].grad), (image.grad, text.grad), **FLOAT32)


def test_sentence_transformers(run):
    found = run("sentence_transformers")
    found["handle"].undo()
    embeddings = [each.detach().requires_grad_() for each in found["embeddings"]]
    theirs = found["criterion"].compute_loss_from_embeddings(embeddings, None)
    theirs.backward()
    torch.testing.assert_close(found["loss"], theirs, **FLOAT32)
    torch.testing.assert_close([each.grad for each in found["embeddings"]], [each.grad for each in embeddings], **FLOAT32)


@pytest.mark.parametrize("page", ["segmentation_models_pytorch", "monai"])
def test_segmentation_losses(run, page):
    found = run(page)
    found["handle"].undo()
    logits = found["logits"].detach().requires_grad_()
    theirs = found["criterion"](logits, found["target"])
    theirs.backward()
    torch.testing.assert_close(found["loss"], theirs, **FLOAT32)
    torch.testing.assert_close(found["logits"].grad, logits.grad, **FLOAT32)


def test_transformers_detection(run):
    found = run("transformers_detection")
    found["handle"].undo()
    model, gradient = found["model"], found["model"].bbox_predictor.layers[0].weight.grad.clone()
    model.zero_grad()
    del model._loss_function
    theirs = model(pixel_values=found["pixels"], labels=found["labels"]).loss
    theirs.backward()
    torch.testing.assert_close(found["loss"], theirs, **FLOAT32)
    torch.testing.assert_close(found["loss_of_all"], theirs, **FLOAT32)
    torch.testing.assert_close(gradient, model.bbox_predictor.layers[0].weight.grad, rtol=1e-3, atol=1e-6)


def test_torch_compile(run):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = run("torch_compile")
    assert not torch.equal(found["gradients"][0], found["gradients"][2])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_mixed_precision(run):
    ours = run("mixed_precision")
    assert sorted(ours["losses"], reverse=True) == ours["losses"]
    theirs = run("mixed_precision", {"import cross_entropy": "import plain_torch", "cross_entropy(": "torch.nn.functional.cross_entropy("})
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-3, atol=0)


def test_activation_checkpointing(run):
    assert all(gradient.abs().max() > 0 for gradient in run("activation_checkpointing")["fused"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_graphs(run):
    losses = run("cuda_graphs")["losses"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("ddp", "the gradient is that of the whole batch"),
        ("fsdp2", "both gradients are those of one process with the whole batch"),
        ("dtensor", "without group it is refused: weight must be a whole tensor, got a DTensor (12, 16): gather it first"),
    ],
    ids=["ddp", "fsdp2", "dtensor"],
)
def test_two_processes(page, said, tmp_path, torchrun):
    for name, code in files_of(f"{FOLDER}/{page}.md").items():
        (tmp_path / name).write_text(code + ENDED, encoding="utf-8")
    done = torchrun(f"{page}.py", cwd=tmp_path, **FOR_RANKS)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
