"""The Triton kernels that run the whole stack: programs that take a tile each, once or for a second time.

Takes    what `run_tile` takes, of one turn or of both.
Gives    the stack's output.
Knows nothing of what a tile computes.

Letters  B rows, S positions, D width, L layers.
"""

import triton
import triton.language as tl

from frontier.layers.stack_tile import run_tile


# The call's number grows for ever: a kernel specialised on one value of it would be compiled anew, or wrong.
@triton.jit(do_not_specialize=["call"])
def stack_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, valid_ptr, weights_ptr, vectors_ptr, qkv_ptr, published_ptr, small_ptr, call, S, layer_stride,
    L: tl.constexpr, D: tl.constexpr, F: tl.constexpr, H: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FC: tl.constexpr, TILES: tl.constexpr,
    TILES_UP: tl.constexpr, ATTEND: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_V: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr, SMALL: tl.constexpr,
    TURN: tl.constexpr, FIRST_TILES: tl.constexpr, FIRST_TILES_UP: tl.constexpr, FAST: tl.constexpr,
    SPLIT_OUT: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """One turn; grid `(B x TILES,)`.

    TURN     "only": small is not looked at; "first": it is written; "second": rows without one are left as they are
    small    [B, FIRST_TILES], of the launch that was the first turn
    """
    number = tl.program_id(0)
    is_wanted = True
    if TURN == "second":
        is_wanted = _small_in_row(small_ptr, number // TILES, call, FIRST_TILES, FIRST_TILES_UP, False) > 0
    if is_wanted:
        run_tile(
            number, x_ptr, out_ptr, valid_ptr, weights_ptr, vectors_ptr, qkv_ptr, published_ptr, small_ptr, call, S,
            layer_stride, L, D, F, H, K, P, GROUP, M, N, FC, TILES, TILES_UP, ATTEND, CAUSAL, MASKED, SPLIT, SPLIT_V,
            DOT, STAGES, EPS, SMALL, TURN, FAST, SPLIT_OUT, PC, False,
        )  # fmt: skip
    else:
        _publish_nothing(published_ptr, number, L, TILES, TILES_UP)


@triton.jit(do_not_specialize=["call"])
def stack_at_once_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, valid_ptr, weights_ptr, vectors_ptr, qkv_ptr, published_ptr, again_weights_ptr,
    again_vectors_ptr, again_qkv_ptr, again_published_ptr, small_ptr, call, S, layer_stride, again_layer_stride,
    firsts,
    L: tl.constexpr, D: tl.constexpr, F: tl.constexpr, H: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FC: tl.constexpr, TILES: tl.constexpr,
    TILES_UP: tl.constexpr, ATTEND: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_V: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr, SMALL: tl.constexpr,
    FAST: tl.constexpr, SPLIT_OUT: tl.constexpr, PC: tl.constexpr, AGAIN_M: tl.constexpr, AGAIN_N: tl.constexpr,
    AGAIN_FC: tl.constexpr, AGAIN_TILES: tl.constexpr, AGAIN_TILES_UP: tl.constexpr, AGAIN_STAGES: tl.constexpr,
    AGAIN_PC: tl.constexpr,
):  # fmt: skip
    """Both turns; grid `(B x TILES + B x AGAIN_TILES,)`, of which the first `firsts` take the first turn.

    Programs of the second wait for all tiles of their row in the first: these have lower numbers, so a card starts
    them first. Which rows they do again is known to the card alone, and a launch of their own would cost 5 us of
    the host.
    """
    number = tl.program_id(0)
    if number < firsts:
        run_tile(
            number, x_ptr, out_ptr, valid_ptr, weights_ptr, vectors_ptr, qkv_ptr, published_ptr, small_ptr, call, S,
            layer_stride, L, D, F, H, K, P, GROUP, M, N, FC, TILES, TILES_UP, ATTEND, CAUSAL, MASKED, SPLIT, SPLIT_V,
            DOT, STAGES, EPS, SMALL, "first", FAST, SPLIT_OUT, PC, True,
        )  # fmt: skip
    else:
        number -= firsts
        if _small_in_row(small_ptr, number // AGAIN_TILES, call, TILES, TILES_UP, True) > 0:
            run_tile(
                number, x_ptr, out_ptr, valid_ptr, again_weights_ptr, again_vectors_ptr, again_qkv_ptr,
                again_published_ptr, small_ptr, call, S, again_layer_stride, L, D, F, H, K, P, 1, AGAIN_M, AGAIN_N,
                AGAIN_FC, AGAIN_TILES, AGAIN_TILES_UP, "loop", CAUSAL, MASKED, False, False, "tf32x3", AGAIN_STAGES,
                EPS, SMALL, "second", FAST, False, AGAIN_PC, True,
            )  # fmt: skip
        else:
            _publish_nothing(again_published_ptr, number, L, AGAIN_TILES, AGAIN_TILES_UP)


@triton.jit
def _small_in_row(  # type: ignore[no-untyped-def]
    small_ptr, b, call, TILES: tl.constexpr, TILES_UP: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    # Whether a tile of the row's first turn wrote that it held a small token; under AT_ONCE once all have written.
    tile_T = tl.arange(0, TILES_UP)
    own_T = tile_T < TILES
    place_T = small_ptr + b * TILES + tile_T
    if AT_ONCE:
        found_T = tl.atomic_add(place_T, 0, mask=own_T, sem="acquire", scope="gpu")
        while tl.min(tl.where(own_T, found_T - 2 * call, 0), axis=0) < 0:
            found_T = tl.atomic_add(place_T, 0, mask=own_T, sem="acquire", scope="gpu")
        tl.debug_barrier()
        return tl.max(tl.where(own_T, found_T - 2 * call, 0), axis=0)
    else:
        return tl.max(tl.load(place_T, mask=own_T, other=0), axis=0)


@triton.jit
def _publish_nothing(published_ptr, number, L: tl.constexpr, TILES: tl.constexpr, TILES_UP: tl.constexpr):  # type: ignore[no-untyped-def]
    # The counters stand as after any other call.
    if TILES > 1:
        tile, later_T = number % TILES, tl.arange(0, TILES_UP)
        counters_T = published_ptr + (number // TILES).to(tl.int64) * (TILES * L) + later_T * L
        for layer in range(L):
            is_later_T = (later_T > tile) & (later_T < TILES)
            tl.atomic_add(counters_T + layer, 1, mask=is_later_T, sem="relaxed", scope="gpu")
