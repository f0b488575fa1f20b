"""The demo model's tokenizer: byte-level BPE with a ChatML-like chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
MAX_LENGTH = 2048

PAD, BOS, TURN, END = "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"
# The order fixes the ids: pad 0, bos 1, turn start 2, end 3. The end of a turn is also the end of a
# document, so exactly one token stops.
SPECIAL_TOKENS = (PAD, BOS, TURN, END)

# Content may be null or a list of parts, as OpenAI clients send it. Tools and tool calls become
# text, since this model never learned to call any; calls have the form that `granite4` parses.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}
{%- if part is string -%}{{ part }}{%- elif part.text is defined -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set system_first = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools or system_first -%}
{{- '<|im_start|>system\\n' -}}
{%- if system_first -%}{{- text(messages[0].content) -}}{%- endif -%}
{%- if tools -%}
{%- if system_first -%}{{- '\\n\\n' -}}{%- endif -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and system_first) -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{{- '<|im_start|>' + role + '\\n' + text(message.content) -}}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{{- '\\n<tool_call>' + (call.function or call) | tojson + '</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the vocabulary from `texts` and wrap it for transformers."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        # All 256 bytes, so that any text can be encoded without an unknown token.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer=trainer)
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A $B",
                special_tokens=[(BOS, core.token_to_id(BOS))],
            ),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
