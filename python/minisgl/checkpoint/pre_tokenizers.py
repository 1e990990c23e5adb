"""How byte-level BPE tokenizers of GGUF files split a text before their merges apply.

A GGUF file has the tokens and the merges, but of the split only a name, `tokenizer.ggml.pre`. The
names and what they stand for are llama.cpp's (MIT), as of October 2026:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp

Where that table rewrites an expression for llama.cpp's own matcher, this one has the expression of
the model's tokenizer.json, which `tokenizers` can run. It leaves out encoders, chameleon, and what
no regular expression splits or is no byte-level BPE: gemma4, sarvam-moe, afmoe, kimi-k2.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name stands for.

    Attributes:
        patterns: regular expressions in Oniguruma's syntax; each splits the pieces of the one
            before it into its matches and what is between them.
        uses_whole_pieces: a piece that is a token becomes that token, without any merge.
        composes: the text is brought into Unicode's form NFC first.
        adds_bos: a prompt begins with the bos token, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    uses_whole_pieces: bool = False
    composes: bool = False
    adds_bos: bool = False

    def apply_to(self, tokenizer: Tokenizer) -> None:
        """Give a byte-level BPE tokenizer this split, in place."""
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.model.ignore_merges = self.uses_whole_pieces
        if self.composes:
            tokenizer.normalizer = normalizers.NFC()


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITAL_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_WORD = rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_CHINESE_AND_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_AND_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (  # of Unicode 11, without Georgian's small letters
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_MARKS}|{_LINES}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_LINES}"
_TEKKEN = rf"{_CASED_WORD}|{_CAPITAL_WORD}|\p{{N}}|{_MARKS_AND_SLASHES}|{_LINES}"
_CONTRACTED = rf"{_CASED_WORD}{_CONTRACTIONS}?|{_CAPITAL_WORD}{_CONTRACTIONS}?"
_GPT4O = rf"{_CONTRACTED}|\p{{N}}{{1,3}}|{_MARKS_AND_SLASHES}|{_LINES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_JAIS2_SPACES = "|".join(rf"\s{{{width}}}(?!\S)" for width in (512, 256, 128, 64, 32, 16, 8, 4))
_FAMILIES = (
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
    ),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (
        PreTokenizer((_LLAMA3,), uses_whole_pieces=True, adds_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (PreTokenizer((_LLAMA3,), uses_whole_pieces=True), "glm4 glm5"),
    (PreTokenizer((_QWEN2,), composes=True), "qwen2 deepseek-r1-qwen f2llmv2 megrez"),
    (PreTokenizer((_QWEN2,)), "kormo stablelm2 hunyuan solar-open grok-2"),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
            ),
            composes=True,
        ),
        "qwen35",
    ),
    (PreTokenizer((_TEKKEN,), uses_whole_pieces=True, adds_bos=True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)), "tiny_aya cohere2moe"),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _CHINESE_AND_KOREAN,
                r"\p{N}",
            )
        ),
        "deepseek-llm",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_AND_KOREAN, r"\p{N}")),
        "deepseek-coder",
    ),
    (
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CHINESE_AND_JAPANESE,
                rf"{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
            )
        ),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CHINESE_AND_JAPANESE,
                rf"{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
                r"\p{N}",
            )
        ),
        "spark2_5",
    ),
    (
        PreTokenizer(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+"
                "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
                "\ufe30-\ufe4f]+"
                f"|[\u3105-\u312f]+|{_CHINESE_AND_JAPANESE}",
                rf"{_CONTRACTED}|\p{{N}}|{_MARKS_AND_SLASHES}|{_LINES}",
            ),
            uses_whole_pieces=True,
        ),
        "youtu",
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+"
                rf"|{_JAIS2_SPACES}|\s{{1,2}}(?!\S)|\s",
            )
        ),
        "jais-2",
    ),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
            )
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (
        PreTokenizer(
            (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",),
        ),
        "seed-coder",
    ),
    (PreTokenizer((rf"{_WORD}|\p{{N}}|{_MARKS}|{_LINES}",)), "ufakzeka"),
    (PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
        "exaone-moe",
    ),
    (
        PreTokenizer(
            (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_MARKS}|{_LINES}"),
            uses_whole_pieces=True,
        ),
        "minicpm5",
    ),
    (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
)
PRE_TOKENIZERS = {name: family for family, names in _FAMILIES for name in names.split()}
