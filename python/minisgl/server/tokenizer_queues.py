"""The queues from an API process to the tokenizers.

From a uid follows the tokenizer of the request or question, so all messages about it go to one.
"""

from __future__ import annotations

from minisgl.message import AbortMsg, NewDetokenizerMsg, ShutdownMsg, TokenizerMsg, encode
from minisgl.processes.addresses import DETOKENIZER, Addresses, tokenizer_of
from minisgl.processes.queues import PushQueue


class TokenizerQueues:
    """Sends messages to the tokenizers at these addresses."""

    def __init__(self, addresses: Addresses) -> None:
        self._num_api = addresses.num_api
        self._queues: list[PushQueue[TokenizerMsg]] = []
        self.connect(addresses)

    def send(self, uid: int, msg: TokenizerMsg) -> None:
        """Send a message that is about a uid."""
        self._queues[self.number_of(uid)].put(msg)

    def abort(self, uid: int) -> None:
        """Abort a request or question, if there are tokenizers: without them it is gone."""
        if self._queues:
            self.send(uid, AbortMsg(uid))

    def number_of(self, uid: int) -> int:
        """Which tokenizer has a uid."""
        return tokenizer_of(uid, self._num_api, len(self._queues))

    def connect(self, addresses: Addresses) -> None:
        """Send to those of a new epoch from now on; those before were dropped."""
        self._queues = [PushQueue(address, encode) for address in addresses.tokenizers]

    def drop(self) -> None:
        """Close the queues, and drop what is not sent: the workers are dead, or will be killed."""
        for queue in self._queues:
            queue.drop()
        self._queues = []

    def replace(self, name: str, addresses: Addresses) -> set[int]:
        """Send to the successor of a tokenizer or the detokenizer what its predecessor would get.

        All tokenizers learn which detokenizer there is now, before any message that follows.

        Args:
            addresses: with the successor's.

        Returns:
            the numbers of the tokenizers that were replaced: the detokenizer is one, or none.
        """
        numbers = {i for i, each in enumerate(addresses.tokenizer_names) if each == name}
        for number in numbers:
            self._queues[number].drop()
            self._queues[number] = PushQueue(addresses.tokenizers[number], encode)
        for queue in self._queues:
            queue.put(NewDetokenizerMsg(addresses.life_of(DETOKENIZER)))
        return numbers

    def shut_down(self) -> None:
        """Let the workers end."""
        for i, queue in enumerate(self._queues):
            queue.put(ShutdownMsg(stops_scheduler=i == 0))

    def close(self) -> None:
        """Close the queues; what is not sent has a second."""
        for queue in self._queues:
            queue.close()
