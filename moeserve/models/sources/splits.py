"""The regular expressions by which tokenizers split text into words before BPE, by the names in GGUF files.

Each is from a published tokenizer.json. Most have the same form: contractions, words with one leading mark, digits,
runs of punctuation, line ends, trailing blanks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Split:
    names: tuple[str, ...]  # values of `tokenizer.ggml.pre`; the first is used for a folder
    expression: str  # as tokenizer.json has it
    nfc: bool  # texts are normalised to Unicode NFC first; no GGUF key tells
    # Expressions applied first, each to the text that the previous ones left; their matches are words.
    before: tuple[str, ...] = ()
    ignores_merges: bool = False  # default: a word that equals a token is that token, without merges
    adds_bos: bool = False  # default: a text starts with the BOS token

    @property
    def expressions(self) -> tuple[str, ...]:
        """All expressions, in the order of application."""
        return *self.before, self.expression


QWEN2 = Split(
    ("qwen2", "deepseek-r1-qwen", "f2llmv2"),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
    nfc=True,
)
HUNYUAN = replace(QWEN2, names=("hunyuan", "megrez", "kormo", "solar-open"), nfc=False)
# Combining marks are part of a word.
QWEN35 = Split(
    ("qwen35",),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _ENDS,
    nfc=True,
)
# Laguna: splits lines first, so that blanks before a line end are not part of it.
LAGUNA = replace(HUNYUAN, names=("laguna",), before=(r"[^\n]+|[\n]+",))
# Each line end is a word.
SEED_CODER = Split(
    ("seed-coder",),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _ENDS,
    nfc=False,
)
# Ling and Ring: the words of HUNYUAN by another expression.
BAILING = Split(
    ("bailingmoe2", "bailingmoe", "llada-moe"),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    nfc=False,
)
# K-EXAONE: words separated by single spaces form one word; combining marks belong to words.
EXAONE_MOE = Split(
    ("exaone-moe",),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    nfc=False,
)
# Digits in groups of three. Some tokens, such as " \u738b", cannot be reached by merges.
GLM4 = Split(
    ("glm4", "glm5", "chatglm-bpe"),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
    nfc=False,
    ignores_merges=True,
)
# Llama 3 splits likewise.
LLAMA3 = replace(
    GLM4,
    names=("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    adds_bos=True,
)
SMAUG = replace(GLM4, names=("smaug-bpe", "dbrx"), ignores_merges=False)
MINICPM5 = Split(
    ("minicpm5",),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
    nfc=False,
    before=(r"\p{N}{1,3}",),
    ignores_merges=True,
)
GPT2 = Split(
    ("gpt-2", "gigachat", "mellum", "trillion", "granite-docling", "a.x-4.0", "exaone4"),
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    nfc=False,
)
# GPT-NeoX's, also used by OLMoE.
OLMO = replace(GPT2, names=("olmo", "mpt"), nfc=True)
# GPT-2's words, with each digit on its own; also Granite's.
SMOLLM = replace(GPT2, names=("smollm", "refact", "starcoder", "minerva-7b", "mellum2"), before=(r"\p{N}",))
# Runs of anything except blanks and marks of many scripts, with one space before them.
VIKING = Split(
    ("viking",),
    r"\p{N}",
    nfc=False,
    before=(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",),
)
# OpenAI's o200k: a word ends before an upper-case letter that follows lower case; contractions belong to the
# preceding word, slashes to punctuation.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = Split(
    ("gpt-4o", "minimax-m2", "llama4", "kanana2", "talkie"),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _ENDS,
    nfc=False,
)
# Cohere's since 2025: digits in groups of three from the right, where no letter follows.
TINY_AYA = replace(O200K, names=("tiny_aya",), before=(r"\d{1,3}(?=(?:\d{3})*\b)",), adds_bos=True)
# Mistral's since 2024: like o200k without contractions, with each digit on its own.
TEKKEN = Split(
    ("tekken",),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _ENDS,
    nfc=False,
    ignores_merges=True,
    adds_bos=True,
)
# Youtu: runs of Korean, of marks, and of Chinese and Japanese letters are split off first.
YOUTU = replace(
    O200K,
    names=("youtu",),
    expression=O200K.expression.replace(r"\p{N}{1,3}", r"\p{N}"),
    before=(
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
        "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    ),
    ignores_merges=True,
)

# Digits in groups of three, and runs of Chinese and Japanese letters, are split off first; then a mark may begin a
# word of Latin letters. The expression has line ends as characters, not as escapes.
DEEPSEEK_V3 = Split(
    ("deepseek-v3", "joyai-llm"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    nfc=False,
    before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)

# Trinity: digits in groups of three from the right, and letters of further scripts without blanks between words (in
# Thai from the leading vowels on), are split off first.
AFMOE = replace(
    DEEPSEEK_V3,
    names=("afmoe",),
    expression=DEEPSEEK_V3.expression.replace("\r\n", r"\r\n"),
    before=(
        r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
        "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    ),
)
DEEPSEEK_CODER = Split(
    ("deepseek-coder",),
    r"\p{N}",
    nfc=False,
    before=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
)

# DeepSeek-V2 and its coders: line ends, letters of scripts with cases, and Latin and Chinese punctuation are split
# off first, each run with one leading blank; each digit is a word. The letters (upper, lower or title case) are from an
# older Unicode version, without newer scripts.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = Split(
    ("deepseek-llm",),
    r"\p{N}",  # `Digits` in tokenizer.json
    nfc=False,
    before=(
        "[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    ),
)
# Like O200K, except that runs of Chinese letters are words and slashes are (see tokenization_kimi.py of the
# repository).
_UPPER_KIMI, _LOWER_KIMI = (
    rf"[{letters}&&[^\p{{Han}}]]"
    for letters in (r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}")
)
KIMI_K2 = Split(
    ("kimi-k2",),
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}*{_LOWER_KIMI}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}+{_LOWER_KIMI}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
    nfc=False,
)

SPLITS: dict[str, Split] = {
    name: split
    for split in (
        *(HUNYUAN, QWEN2, QWEN35, LAGUNA, SEED_CODER, BAILING, EXAONE_MOE),
        *(SMAUG, LLAMA3, GLM4, MINICPM5, OLMO, GPT2, SMOLLM, VIKING, O200K, TINY_AYA, TEKKEN, YOUTU),
        *(AFMOE, DEEPSEEK_V3, DEEPSEEK_LLM, DEEPSEEK_CODER, KIMI_K2),
    )
    for name in split.names
}
# Of splits with the same expressions, a folder uses the last.
BY_EXPRESSIONS: dict[tuple[str, ...], Split] = {split.expressions: split for split in SPLITS.values()}
