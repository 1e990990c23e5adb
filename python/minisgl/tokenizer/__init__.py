"""Text to ids and ids to text, in processes of their own.

    tokenize.py        `Tokenizer`: prompts of all kinds to token ids
    chat_template.py   conversations to texts
    template_trial.py  a trial of the chat template, bounded in time and memory
    tool_prompt.py     tools in prompts, where the chat template shows none
    control_tokens.py  keeps control tokens that a client writes from being control tokens
    length_check.py    refuses texts that are too long, before they are tokenized
    detokenize.py      `Detokenizer`: outputs of the scheduler to replies with text
    text_decoders.py   token ids of one answer to text, as they come
    vocabulary.py      `Vocabulary`: the bytes of each token
    worker.py          `tokenize_worker`: the loop of a process that does either or both

The scheduler handles ids only, API processes text only.
"""

from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.tokenize import Tokenizer
from minisgl.tokenizer.worker import tokenize_worker

__all__ = ["Detokenizer", "Tokenizer", "tokenize_worker"]
