"""What one program of the one kernel does: a tile through the whole stack, all layers.

Takes    rows of float32, packed weights and vectors, scratch for q, k and v, counters.
Gives    the stack's output; the float32 residual of a tile never leaves the chip.
Knows nothing of modules, tables or why a tile has its size.

One program owns one tile of M positions of one row and carries it through every layer. A tile's keys and
values reach later tiles of its row through scratch memory; a counter for each (row, tile, layer) says how many
earlier tiles have published. A tile waits for lower program numbers only, which a card starts first, so no
order of starting can deadlock. Scratch is apart for each layer: an early tile may run layers ahead of a late one.

What softmax cannot see is folded away in `stack.py`: a key's bias adds the same to every score of a query, and a
value's passes through the weights, which sum to 1, into the bias of the output projection.

Letters  B rows, S positions, D width, F feed-forward width, H heads, K head width, P padded width of a group
         of heads, M positions of a tile, N keys at a time, C columns at a time, T tiles of a row.
"""

import triton
import triton.language as tl

from frontier.layers.tile_arithmetic import (
    exp2,
    fed_forward,
    gelu,
    inverse,
    keys,
    matrix,
    projected,
    softened,
    split,
    spread,
    standardised,
    three_dots,
    values,
    visible,
    weighed,
)


@triton.jit
def run_tile(  # type: ignore[no-untyped-def]
    number,
    x_ptr,
    out_ptr,
    valid_ptr,
    weights_ptr,
    vectors_ptr,
    qkv_ptr,
    published_ptr,
    small_ptr,
    call,
    S,
    qkv_layer_stride,
    L: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FC: tl.constexpr,
    TILES: tl.constexpr,
    TILES_UP: tl.constexpr,
    ATTEND: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_V: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
    SMALL: tl.constexpr,
    TURN: tl.constexpr,
    FAST: tl.constexpr,
    SPLIT_OUT: tl.constexpr,
    PC: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """`out = stack(x)` of one tile of `[B, S, D]` rows: tile t of row b is number b x TILES + t.

    weights   of each layer q, k, v and out [D, D], [D, F], [F, D]; stored as [in, out]; under SPLIT what rounding
              left of the last two once more, under SPLIT_OUT what it left of out's
    vectors   of each layer 3D (q's bias, then zeros), D, D, F; at the end gain and bias of the last norm; float32
    qkv       [L if TILES > 1 else 1, B, S, 3D], in the precision of attention's operands; 4D under SPLIT_V, which
              adds what rounding left of v
    published [B, TILES, L] counters, which stood at `call x t` when the launch began
    P, GROUP  columns of q that are taken at once, and the heads that share them; what exceeds them is padding
    small     [B, TILES]: under TURN "first", whether a tile held a token that varies by less than SMALL, so
              that the last norm magnifies the rounding, or one that overflowed
    SPLIT_OUT the context of a row's first tile meets both halves of out's weights: over few keys nothing averages out
    PC        columns of q, k and v at a time; fewer take less registers and shared memory
    TURN      "first": small is written; any other: it is not
    AT_ONCE   small holds 2 x call and whether there was one, and is written last: others wait for it
    ATTEND    "heads": all heads and keys at once, weights fetched a phase ahead (few tiles, M = 16);
              "single": head by head over all keys; "loop": head by head, N keys at a time, GROUP 1
    """
    gemm = weights_ptr.dtype.element_ty
    half = qkv_ptr.dtype.element_ty
    LAYER_WEIGHTS: tl.constexpr = (5 if SPLIT_OUT else 4) * D * D + (4 if SPLIT else 2) * D * F
    LAYER_VECTORS: tl.constexpr = 5 * D + F
    LOW: tl.constexpr = D * (D + 2 * F)  # from out's weights to what rounding left of them
    R: tl.constexpr = (4 if SPLIT_V else 3) * D
    b = (number // TILES).to(tl.int64)
    tile = number % TILES
    columns_D = tl.arange(0, D)
    columns_P = tl.arange(0, P)
    place_M = tile * M + tl.arange(0, M)
    real_M = place_M < S
    later_T = tl.arange(0, TILES_UP)
    counters_T = published_ptr + b * (TILES * L) + later_T * L
    is_later_T = (later_T > tile) & (later_T < TILES)
    stop = tl.minimum((tile + 1) * M, S) if CAUSAL else S
    at_N = tl.arange(0, N)
    all_N = at_N >= 0
    seen_N = at_N < stop
    live_M = real_M
    if MASKED:
        # Invalid tokens enter as zeros, so that nothing they hold can reach a valid one as 0 x NaN.
        live_M = tl.load(valid_ptr + b * S + place_M, mask=real_M, other=0) != 0
        if ATTEND != "loop":
            seen_N = tl.load(valid_ptr + b * S + at_N, mask=seen_N, other=0) != 0
    x_MD = tl.load(x_ptr + (b * S + place_M)[:, None] * D + columns_D[None, :], mask=live_M[:, None], other=0.0)
    if TURN == "first":
        found = tl.max((live_M & (spread(x_MD, D) < SMALL * SMALL * D)).to(tl.int32), axis=0)
    row_ptr = qkv_ptr + b * (S * R)
    # Later tiles see so many keys that rounding averages out, unless most of the row's first ones are padding.
    is_early = tile == 0
    if SPLIT_OUT and MASKED:
        at_M = tl.arange(0, M)
        valid_M = tl.load(valid_ptr + b * S + at_M, mask=at_M < S, other=0) != 0
        is_early = is_early | (tl.sum(valid_M.to(tl.int32), axis=0) < M // 2)
    if ATTEND == "heads":
        wq_DD = matrix(weights_ptr, D, D)
        wk_DD = matrix(weights_ptr + D * D, D, D)
        wv_DD = matrix(weights_ptr + 2 * D * D, D, D)
    for layer in range(L):
        w_ptr = weights_ptr + layer * LAYER_WEIGHTS
        v_ptr = vectors_ptr + layer * LAYER_VECTORS
        out_w_ptr = w_ptr + 3 * D * D
        in_w_ptr = w_ptr + 4 * D * D
        if TILES > 1 and layer > 0:
            row_ptr += qkv_layer_stride
        if ATTEND == "heads":
            own_ptr = row_ptr + place_M[:, None] * R + columns_D[None, :]
            h_MD = standardised(x_MD, D, EPS).to(gemm)
            k_MD = tl.dot(h_MD, wk_DD, input_precision=DOT)
            tl.store(own_ptr + D, k_MD.to(half), mask=real_M[:, None])
            v_MD = tl.dot(h_MD, wv_DD, input_precision=DOT)
            tl.store(own_ptr + 2 * D, v_MD.to(half), mask=real_M[:, None])
        else:
            projected(
                x_MD, row_ptr, w_ptr, v_ptr, place_M, real_M, D, R, M, PC, SPLIT_V, DOT, STAGES, EPS
            )  # fmt: skip
        tl.debug_barrier()
        if TILES > 1:
            tl.atomic_add(counters_T + layer, 1, mask=is_later_T, sem="release", scope="gpu")
        if ATTEND == "heads":
            q_MD = tl.dot(h_MD, wq_DD, input_precision=DOT) + tl.load(v_ptr + columns_D)[None, :]
            wo_DD = matrix(out_w_ptr, D, D)
            w1_DF = matrix(in_w_ptr, D, F)
            w2_FD = matrix(in_w_ptr + D * F, F, D)
        if TILES > 1:
            counter_ptr = published_ptr + (b * TILES + tile) * L + layer
            while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < (call + 1) * tile:
                pass
            tl.debug_barrier()
        if ATTEND == "heads":
            heads_H = tl.arange(0, H)
            columns_K = tl.arange(0, K)
            within_N = at_N < stop
            head_ptr = row_ptr + heads_H[:, None, None] * K
            place_HKN = head_ptr + at_N[None, None, :] * R + columns_K[None, :, None]
            k_HKN = tl.load(place_HKN + D, mask=within_N[None, None, :], other=0.0)
            place_HNK = head_ptr + at_N[None, :, None] * R + columns_K[None, None, :]
            v_HNK = tl.load(place_HNK + 2 * D, mask=within_N[None, :, None], other=0.0)
            q_HMK = tl.permute(tl.reshape(q_MD.to(half), (M, H, K)), (1, 0, 2))
            visible_MN = visible(at_N, seen_N, place_M, CAUSAL)
            s_HMN = tl.where(visible_MN[None, :, :], tl.dot(q_HMK, k_HKN, input_precision=DOT), -float("inf"))
            top_HM = tl.max(s_HMN, axis=2)
            p_HMN = exp2(s_HMN - tl.where(top_HM == -float("inf"), 0.0, top_HM)[:, :, None], FAST)
            sum_HM = tl.sum(p_HMN, axis=2)
            context_HMK = tl.dot(p_HMN.to(half), v_HNK, input_precision=DOT)
            context_HMK *= inverse(tl.where(sum_HM == 0.0, 1.0, sum_HM), FAST)[:, :, None]
            context_MD = tl.reshape(tl.permute(context_HMK.to(gemm), (1, 0, 2)), (M, D))
            x_MD = tl.dot(context_MD, wo_DD, x_MD, input_precision=DOT)
        else:
            for first in tl.range(0, D, GROUP * K, num_stages=STAGES):
                own_P = columns_P < GROUP * K
                head_ptr = row_ptr + first
                q_MP = values(head_ptr, place_M, columns_P, real_M, own_P, R)
                wo_PD_ptr = out_w_ptr + (first + columns_P)[:, None] * D + columns_D[None, :]
                wo_PD = tl.load(wo_PD_ptr, mask=own_P[:, None], other=0.0)
                if ATTEND == "single":
                    k_PN = keys(head_ptr + D, at_N, columns_P, at_N < stop, own_P, R)
                    v_NP = values(head_ptr + 2 * D, at_N, columns_P, at_N < stop, own_P, R)
                    if SPLIT_V:
                        low_NP = values(head_ptr + 3 * D, at_N, columns_P, at_N < stop, own_P, R)
                    context_MP = tl.zeros([M, P], tl.float32)
                    for member in tl.static_range(GROUP):
                        mine_P = columns_P // K == member
                        q_one_MP = q_MP
                        if GROUP > 1:
                            # The other heads' columns are 0: their product with the shared keys vanishes.
                            q_one_MP = tl.where(mine_P[None, :], q_MP, 0.0)
                        visible_MN = visible(at_N, seen_N, place_M, CAUSAL)
                        s_MN = tl.where(visible_MN, tl.dot(q_one_MP, k_PN, input_precision=DOT), -float("inf"))
                        p_MN, _ = softened(s_MN, tl.max(s_MN, axis=1), FAST)
                        sum_M = tl.sum(p_MN, axis=1)
                        one_MP = tl.dot(p_MN.to(half), v_NP, input_precision=DOT)
                        if SPLIT_V:
                            one_MP = tl.dot(p_MN.to(half), low_NP, one_MP)
                        one_MP *= inverse(tl.where(sum_M == 0.0, 1.0, sum_M), FAST)[:, None]
                        context_MP = tl.where(mine_P[None, :], one_MP, context_MP) if GROUP > 1 else one_MP
                else:
                    top_M = tl.full([M], -float("inf"), tl.float32)
                    sum_M = tl.zeros([M], tl.float32)
                    context_MP = tl.zeros([M, P], tl.float32)
                    # Keys before the tile are visible to all of it: no comparison and no case of nothing seen.
                    full = (tile * M // N) * N if CAUSAL and not MASKED else 0
                    for n in tl.range(0, full, N, num_stages=STAGES):
                        near_N = n + tl.arange(0, N)
                        k_PN = keys(head_ptr + D, near_N, columns_P, all_N, own_P, R)
                        v_NP = values(head_ptr + 2 * D, near_N, columns_P, all_N, own_P, R)
                        s_MN = tl.dot(q_MP, k_PN, input_precision=DOT)
                        p_MN, top_M, sum_M, context_MP = weighed(s_MN, v_NP, top_M, sum_M, context_MP, True, DOT, FAST)
                        if SPLIT_V:
                            low_NP = values(head_ptr + 3 * D, near_N, columns_P, all_N, own_P, R)
                            context_MP = tl.dot(p_MN, low_NP, context_MP)
                    for n in tl.range(full, stop, N, num_stages=STAGES):
                        near_N = n + tl.arange(0, N)
                        within_N = near_N < stop
                        k_PN = keys(head_ptr + D, near_N, columns_P, within_N, own_P, R)
                        v_NP = values(head_ptr + 2 * D, near_N, columns_P, within_N, own_P, R)
                        near_seen_N = within_N
                        if MASKED:
                            near_seen_N = tl.load(valid_ptr + b * S + near_N, mask=within_N, other=0) != 0
                        visible_MN = visible(near_N, near_seen_N, place_M, CAUSAL)
                        s_MN = tl.where(visible_MN, tl.dot(q_MP, k_PN, input_precision=DOT), -float("inf"))
                        p_MN, top_M, sum_M, context_MP = weighed(s_MN, v_NP, top_M, sum_M, context_MP, False, DOT, FAST)
                        if SPLIT_V:
                            low_NP = values(head_ptr + 3 * D, near_N, columns_P, within_N, own_P, R)
                            context_MP = tl.dot(p_MN, low_NP, context_MP)
                    context_MP *= inverse(tl.where(sum_M == 0.0, 1.0, sum_M), FAST)[:, None]
                x_MD = tl.dot(context_MP.to(gemm), wo_PD, x_MD, input_precision=DOT)
                if SPLIT_OUT:  # noqa: SIM102  # what is known when it is compiled, then what is known to a tile
                    if is_early:
                        low_PD = tl.load(wo_PD_ptr + LOW, mask=own_P[:, None], other=0.0)
                        x_MD = tl.dot(context_MP.to(gemm), low_PD, x_MD)
        x_MD += tl.load(v_ptr + 3 * D + columns_D)[None, :]
        if ATTEND == "heads":
            # The next layer's weights travel while this feed-forward runs; the last layer fetches its own again.
            next_ptr = weights_ptr + tl.minimum(layer + 1, L - 1) * LAYER_WEIGHTS
            wk_DD = matrix(next_ptr + D * D, D, D)
            wv_DD = matrix(next_ptr + 2 * D * D, D, D)
            h_MD, h_low_MD = split(standardised(x_MD, D, EPS), gemm)
            u_MF = tl.zeros([M, F], tl.float32) + tl.load(v_ptr + 5 * D + tl.arange(0, F))[None, :]
            if SPLIT:
                u_MF = three_dots(h_MD, h_low_MD, w1_DF, matrix(in_w_ptr + 2 * D * F, D, F), u_MF)
                g_MF, g_low_MF = split(gelu(u_MF, FAST), gemm)
                x_MD = three_dots(g_MF, g_low_MF, w2_FD, matrix(in_w_ptr + 3 * D * F, F, D), x_MD)
            else:
                u_MF = tl.dot(h_MD, w1_DF, u_MF)
                x_MD = tl.dot(gelu(u_MF, FAST).to(gemm), w2_FD, x_MD)
            wq_DD = matrix(next_ptr, D, D)
            x_MD += tl.load(v_ptr + 4 * D + columns_D)[None, :]
        else:
            x_MD = fed_forward(x_MD, w_ptr, v_ptr, D, F, M, FC, SPLIT, DOT, STAGES, EPS, FAST)
    gain_ptr = vectors_ptr + L * LAYER_VECTORS + columns_D
    y_MD = standardised(x_MD, D, EPS) * tl.load(gain_ptr)[None, :] + tl.load(gain_ptr + D)[None, :]
    if MASKED:
        y_MD = tl.where(live_M[:, None], y_MD, 0.0)
    tl.store(out_ptr + (b * S + place_M)[:, None] * D + columns_D[None, :], y_MD, mask=real_M[:, None])
    if TURN == "first":
        is_lost_M = live_M & ~(tl.abs(tl.sum(x_MD, axis=1)) < float("inf"))  # half precision overflowed
        found = tl.maximum(found, tl.max(is_lost_M.to(tl.int32), axis=0))
        if AT_ONCE:
            tl.debug_barrier()  # what this tile wrote is there before the flag that lets it be written again
            tl.atomic_xchg(small_ptr + number, 2 * call + found, sem="release", scope="gpu")
        else:
            tl.store(small_ptr + number, found)
