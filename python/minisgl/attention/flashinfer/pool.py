"""The pool and the page table, as the kernels of `FlashInferBackend` read them."""

# Dimensions: B requests of a step, H head width, K kv heads, P pages, Q positions of a page,
# R rows of the tables, Z entries of a flat list.

from __future__ import annotations

import functools

import torch
from torch import Tensor

from minisgl.attention.flashinfer.modules import prefill_kernels
from minisgl.attention.flashinfer.plans import LayerShape
from minisgl.attention.flashinfer.prompts import PromptParts
from minisgl.checkpoint import AttentionSpec
from minisgl.kvcache import MHAKVCache

_WORKSPACE_BYTES = 256 << 20


class FlashInferPool:
    """The pool, the page table and places for lists of pages, which layers of all specs share.

    Attributes:
        pages: of each layer, k_PQKH and v_PQKH.
        shape: query heads of this rank, kv heads, head width.
        graph_page_Z, graph_prompt_page_Z: int32, where graphs find the pages of their decodes, and
            of their prompts.
        prefill_kernels: FlashInfer's name of its kernels of prompts.
        query_B: int32, the numbers of queries, from 0.
        prompt_stream: on which prompts attend while decodes do.
    """

    def __init__(self, kv_pool: MHAKVCache, page_table_RP: Tensor, num_heads: int) -> None:
        self.page_table_RP = page_table_RP
        self.device = page_table_RP.device
        self.page_size = kv_pool.page_size
        layers = range(kv_pool.num_layers)
        self.pages = [(kv_pool.k_cache(layer), kv_pool.v_cache(layer)) for layer in layers]
        num_kv_heads, head_dim = self.pages[0][0].shape[2:]
        self.shape = (num_heads, num_kv_heads, head_dim)
        self.dtype = self.pages[0][0].dtype
        self.graph_page_Z = torch.zeros(
            page_table_RP.numel(), dtype=torch.int32, device=self.device
        )
        self.graph_prompt_page_Z = torch.zeros_like(self.graph_page_Z)
        self.prefill_kernels = prefill_kernels(self.device)
        self.query_B = torch.arange(len(page_table_RP), dtype=torch.int32, device=self.device)
        self.prompt_stream = torch.cuda.Stream(self.device, priority=-1)
        self._workspace: Tensor | None = None

    def workspace_of(self, num_bytes: int) -> Tensor:
        """The scratch memory of FlashInfer's wrappers, which has so many bytes or more.

        They share it, as they run one after the other. Those that were made before one that needs
        more keep theirs.
        """
        if self._workspace is None or len(self._workspace) < num_bytes:
            num_bytes = max(num_bytes, _WORKSPACE_BYTES)
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._workspace

    @functools.cached_property
    def prompt_parts(self) -> PromptParts:
        """Where our own kernel of prompts keeps parts; allocated where that kernel is used."""
        return PromptParts.on(self.device, self.shape[2])

    def layer_shape(self, spec: AttentionSpec) -> LayerShape:
        """What the layers of a spec have in common."""
        num_heads, num_kv_heads, head_dim = self.shape
        return LayerShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            device=self.device,
            num_processors=torch.cuda.get_device_properties(self.device).multi_processor_count,
            spec=spec,
        )
