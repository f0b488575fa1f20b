"""docs/from-vllm.md: what users of `vllm serve` type, and what becomes of it.

The tables of options come from the command line's own; the rest stands here.
"""

from collections.abc import Iterator

from coordinator.cli.serve import _DECIDED
from coordinator.protocol import model_support
from coordinator.protocol.engine_options import NOT_OFFERED
from tests.harness.docs.tables import sentence, table

HEAD = """# Moving over from `vllm serve`

`aileron serve` takes the command line of `vllm serve`:

```
vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --max-model-len 32768 --host 0.0.0.0
aileron serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --max-model-len 32768 --host 0.0.0.0 --keys keys.yaml
```

| `vllm serve` | aileron |
|---|---|
| `--tensor-parallel-size 4` | four ranks that start in layout `tp4`; `aileron switch dp4` changes it while requests run |
| `--data-parallel-size 4` | four ranks that start in layout `dp4` |
| both | `-tp 2 -dp 2` is the layout `tp2+tp2` |
| `--pipeline-parallel-size 2` | `-pp 2 -dp 2` is the layout `pp2+pp2`; `-pp 2 -tp 2` is `pp2tp2`, on CPU ranks only |
| `--served-model-name A B` | the same: several names of one model |
| `--api-key`, `VLLM_API_KEY` | the keys that requests need; `aileron key` makes keys with tenants, tiers and limits |
| `--host 0.0.0.0` | needs `--keys`, `--api-key` or `--insecure-no-auth` |
| `--port`, `--api-server-count` | the same, and `--gateways` |
| `--gpu-memory-utilization`, `--max-num-seqs`, `--max-model-len`, `--dtype`, `--chat-template`, `--tool-call-parser`, `--reasoning-parser`, `--kv-cache-memory-bytes` | the same, for each rank |
| `GET /metrics` | on the admin port, 8001, with vLLM's names (`vllm:*`) and aileron's |
| `GET /docs`, `/openapi.json` | not served: [the API page](api.md) has the routes |
| `/v1/embeddings`, `/score`, `/rerank`, `/v1/audio` | not served: ranks generate text |
| one process, or one for each replica | `aileron up` and `aileron serve` start gateway, coordinator and ranks |

`aileron up --model MODEL -- OPTIONS` is the same with aileron's own options first.

## What differs

- Every rank holds all weights, so that it can serve in any layout. A model that fits only split over GPUs needs
  `--weight-parts`; [sizing](sizing.md) has the arithmetic.
- `torch.compile` is off. CUDA graphs replay decodes.
- Answers with a seed are the same in every layout within the precision of the mode's arithmetic; requests without a seed
  get one from the gateway.
- Queues have bounds by tier, and overload answers 429 with `Retry-After`, where vLLM queues without end.

"""
EFFECTLESS = """## Options that are left out

aileron says so when it starts and goes on.

"""
REFUSED = """
## Options that are refused

"""
MODELS = """
## Features that are refused

"""


def page() -> str:
    """The whole page."""
    return "".join(
        [
            HEAD,
            EFFECTLESS + table(("option", "why it has no effect"), _names(_DECIDED)),
            REFUSED + table(("option", "instead"), _names(NOT_OFFERED_THERE)),
            MODELS + "".join(f"- {sentence(text)}\n" for text in SENTENCES),
        ]
    )


READ_BY_SERVE = frozenset({"--api-key", "--host", "--port"})
NOT_OFFERED_THERE = {
    name: advice for name, advice in NOT_OFFERED.items() if name not in READ_BY_SERVE
}
SENTENCES = (
    *(model_support.LORA, model_support.SPECULATION, model_support.KV_CONNECTORS),
    *(model_support.MULTIMODAL, model_support.ENCODERS, model_support.POOLING),
    *(model_support.LATENT_ATTENTION, model_support.RECURRENT, model_support.CHUNKED_ATTENTION),
    *(model_support.ALIBI, model_support.kv_type_refusal("fp8_e5m2"), model_support.MIXED_KV),
)


def _names(options: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, text in options.items():
        yield f"`{name}`", sentence(text)
