"""`python -m tests.harness.vllm.models_page`: writes docs/models.md from the tests' families."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.harness.cells.features import FEATURES, MODES
from tests.harness.cells.servers import ROOT
from tests.harness.cells.switch_matrix import Plan
from tests.harness.vllm.families import REFUSED, SERVED, Family
from tests.harness.vllm.multimodal_models import MULTIMODAL
from tests.harness.vllm.weight_forms import FORMS

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

aileron serves a decoder that vLLM 0.32 builds of its parallel layers and standard attention. It has
no list of families: ranks derive their shares of the weights from the layers. When ranks start,
every kind of layer, and the logits of every layout, must equal those of the whole model. aileron
refuses a model that fails, and gives the reason. `aileron doctor --model X` gives the reasons that
config.json shows, within two seconds.

`python -m tests.harness.vllm.models_page` writes this page from the catalog of the tests.

## Tested families

A tiny random model of each family computes in fp32 on two CPU ranks. All logits differ from static
vLLM's by less than 1e-4 in `dp2`, `tp2` and `sp2`. A stream that crosses `dp2`, `tp2`, `sp2` and
`dp2` has the tokens of one that stays in `dp2`. On GPUs a few of them have run: see
the table of forms.

| family | architecture | what is special | dp | tp | sp | switch |
|---|---|---|---|---|---|---|
"""
TEXTS = """
## Text of multimodal models

`--language-model-only` serves the text of a model that also reads images or sound. Its other parts
are not loaded, and a request with an image is refused. vLLM's classes of these models import
torchvision, which `requirements/gpu.lock` has; on CPU, install the build that belongs to torch. The
logits of these classes are those of the text model with the same weights, in `dp2`, `tp2` and `sp2`
on CPU ranks, within 1e-4.

| model | architecture | its text |
|---|---|---|
"""
REFUSALS = """
## Not served in wide groups

These families are served with `--widths 1` alone; gpt-oss so on CPU, while its row in the table of
forms is for GPUs.

| family | architecture | reason |
|---|---|---|
"""
FORMS_HEAD = """
## Forms of weights and KV

Modes are `dp`, `tp`, `sp`, `shift`, `pp` and mixed layouts. Where ranks view weights, aileron
refuses a form that the table does not have, and gives the reason; with `--widths 1` vLLM decides,
which no GPU has tried. Tests are in `tests/`.

| form | modes on GPUs | over `--weight-parts` | on CPU | CPU test | GPU test | its result |
|---|---|---|---|---|---|---|
"""
FEATURES_HEAD = """
## Features by mode

`integration/test_features.py` asks two CPU ranks in fp32 for each of these in each mode: the
answers are the same. Running tasks keep their tokens over switches in
`integration/test_switch_matrix.py` and `integration/test_pipeline_seeds.py`.

"""
TAIL = """
## Not served

| what | reason |
|---|---|
| images, video and sound; encoder-decoder models, pooling | not supported yet |
| latent attention (`kv_lora_rank`) | its KV has no heads to split |
| recurrent layers (Mamba, linear attention, convolutions) | no heads and pages to split |
| attention in chunks, in a context of several | vLLM gives up the pages of old chunks |
| layers whose KV heads differ in number or size | layers cannot share pages |
| ALiBi in wide groups | a rank computes the slopes of its own heads alone |

## Sliding windows

A layer with a sliding window keeps the pages of all tokens, as other layers do, and reads those in
its window. It computes what static vLLM computes, and needs the KV memory of full attention.
"""


def architecture_of(family: Family) -> str:
    """The name that config.json has for it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.kind]
    return name if isinstance(name, str) else name[0]


def _is_crossed(mode: str, plan: Plan) -> str:
    """Whether tests carry running tasks into and out of a mode by a plan."""
    return "not tested" if (mode, plan) == ("pp", Plan.SPECULATE) else "yes"


def page() -> str:
    """The whole page."""
    served = [
        f"| {each.name} | `{architecture_of(each)}` | {each.special} | yes | yes | yes | yes |\n"
        for each in SERVED
    ]
    refused = [
        f"| {each.name} | `{architecture_of(each)}` | {each.refused} |\n" for each in REFUSED
    ]
    forms = [
        f"| {each.name} | {each.modes} | {each.parts} | {each.cpu} | `{each.cpu_test}` "
        f"| `{each.gpu_test}` | {each.gpu} |\n"
        for each in FORMS
    ]
    features = [
        "| feature | " + " | ".join(MODES) + " |\n",
        "|---" * (1 + len(MODES)) + "|\n",
        *(f"| {name} |" + " yes |" * len(MODES) + "\n" for name in FEATURES),
        *(
            f"| running tasks over a switch by `{plan}` |"
            + "".join(f" {_is_crossed(mode, plan)} |" for mode in MODES)
            + "\n"
            for plan in Plan
        ),
    ]
    texts = [f"| {each.name} | `{each.architecture}` | {each.text.name} |\n" for each in MULTIMODAL]
    pages = [HEAD, *served, TEXTS, *texts, REFUSALS, *refused]
    return "".join([*pages, FORMS_HEAD, *forms, FEATURES_HEAD, *features, TAIL])


if __name__ == "__main__":
    PAGE.write_text(page())
