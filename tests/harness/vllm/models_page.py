"""`python -m tests.harness.vllm.models_page`: writes docs/models.md from the tests' families."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.harness.cells.servers import ROOT
from tests.harness.vllm.families import REFUSED, SERVED, Family
from tests.harness.vllm.multimodal_models import MULTIMODAL

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
`dp2` has the tokens of one that stays in `dp2`. The families are not run on GPUs.

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

These families are served with `--widths 1` alone.

| family | architecture | reason |
|---|---|---|
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


def page() -> str:
    """The whole page."""
    served = [
        f"| {each.name} | `{architecture_of(each)}` | {each.special} | yes | yes | yes | yes |\n"
        for each in SERVED
    ]
    refused = [
        f"| {each.name} | `{architecture_of(each)}` | {each.refused} |\n" for each in REFUSED
    ]
    texts = [f"| {each.name} | `{each.architecture}` | {each.text.name} |\n" for each in MULTIMODAL]
    return "".join([HEAD, *served, TEXTS, *texts, REFUSALS, *refused, TAIL])


if __name__ == "__main__":
    PAGE.write_text(page())
