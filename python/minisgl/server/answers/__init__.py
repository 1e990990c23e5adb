"""The parts of answers, for all APIs.

    builder.py  builders: from replies to a whole answer, or to the events of a stream
    objects.py  objects of answers: usage, log probabilities; and their ids
    errors.py   errors in OpenAI's form

The text of an answer is parsed in `parsing/`. Each API has subclasses of the builders that give
answers its shape. An object of an answer is a `ResponseModel`. Nothing here knows HTTP.
"""

__all__: list[str] = []
