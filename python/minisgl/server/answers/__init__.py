"""What the answers of all APIs are made of.

    builder.py  builders: from replies to a whole answer, or to the events of a stream
    objects.py  objects of answers: usage, log probabilities; and their ids
    errors.py   errors as OpenAI has them

What an answer's text means is in `parsing/`. Each API has subclasses of the builders that give
answers its shape. An object of an answer is a `ResponseModel`. Nothing here knows HTTP.
"""

__all__: list[str] = []
