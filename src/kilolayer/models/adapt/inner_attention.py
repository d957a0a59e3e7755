"""torch's attention with an additional operation between the heads and the output projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InnerAttention(nn.MultiheadAttention):
    """W_o inside(concat heads), with the arguments, results and weights of `nn.MultiheadAttention`.

    An existing attention is converted by setting its class, so its parameters keep their names.
    """

    inside: Callable[[Tensor], Tensor]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        turned = self.batch_first and query.dim() == 3
        if turned:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        # torch's function ends with an output projection; the identity leaves the heads unchanged.
        heads, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            torch.eye(self.embed_dim, dtype=query.dtype, device=query.device),
            None,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        result = self.out_proj(self.inside(heads))
        return (result.transpose(0, 1) if turned else result), weights
