"""A stand-in for the public benchmark script: its interface and its manners, written from the contract.

It has the names that a user replaces (`UserOptimizedTransformer`, `copy_model_weights`), takes the same options,
prints verdicts and times in lines of the same form, and ends with 0 (right) or 2 (wrong).
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TransformerConfig:
    batch_size: int
    seq_len: int
    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool


class Named(nn.Module):
    """Nothing but a place for parts with names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class BaselineTransformer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        D, F = config.d_model, config.ffn_dim
        self.layers = nn.ModuleList(
            Named(
                norm1=nn.LayerNorm(D),
                attention=Named(**{f"{part}_proj": nn.Linear(D, D) for part in ("q", "k", "v", "out")}),
                norm2=nn.LayerNorm(D),
                ffn_in=nn.Linear(D, F),
                ffn_out=nn.Linear(F, D),
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        B, S, D = x.shape
        H = self.config.num_heads
        valid = torch.ones(B, S, dtype=torch.bool, device=x.device) if valid_token_mask is None else valid_token_mask
        hidden = ~valid[:, None, None, :]
        if self.config.causal:
            hidden = hidden | torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            attention, h = layer.attention, layer.norm1(x)
            q, k, v = (
                part(h).view(B, S, H, D // H).transpose(1, 2).contiguous()
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            scores = torch.matmul(q, k.transpose(-2, -1)) * (D // H) ** -0.5
            share = scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(x.dtype)
            context = torch.matmul(share, v).transpose(1, 2).reshape(B, S, D)
            x = x + attention.out_proj(context).masked_fill(~valid[..., None], 0)
            x = x + layer.ffn_out(nn.functional.gelu(layer.ffn_in(layer.norm2(x))))
            x = x.masked_fill(~valid[..., None], 0)
        return self.final_norm(x).masked_fill(~valid[..., None], 0)


class UserOptimizedTransformer(BaselineTransformer):
    """To be replaced."""


def copy_model_weights(baseline: nn.Module, optimized: nn.Module, strict: bool = True) -> None:
    optimized.load_state_dict(baseline.state_dict(), strict=strict)


def rows_and_mask(args: argparse.Namespace, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (args.batch_size, args.seq_len, args.d_model)
    x = torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, args.dtype)) * args.input_scale
    shortest = max(1, round(args.seq_len * (1 - args.padding_ratio)))
    lengths = torch.randint(shortest, args.seq_len + 1, (args.batch_size,), generator=generator, device=device)
    valid = torch.arange(args.seq_len, device=device)[None] < lengths[:, None]
    return x.masked_fill(~valid[..., None], 0), valid


def judge(name: str, got: Tensor, want: Tensor, args: argparse.Namespace) -> tuple[int, int, float, float]:
    """Prints one line; gives failing elements, all elements, largest absolute and relative error."""
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = got.float(), want.float()
    error = (got - want).abs()
    good = got.isfinite() & want.isfinite() & ((error < args.atol) | (error < args.rtol * want.abs()))
    failing, total = int((~good).sum()), good.numel()
    largest, relative = float(error.max()), float((error / want.abs().clamp_min(1e-12)).max())
    word = "FAIL" if failing else "PASS"
    print(f"{name}: {word} | max_abs={largest:.6g} | max_rel={relative:.6g} | failed={failing}/{total}")
    return failing, total, largest, relative


def time_ms(model: nn.Module, x: Tensor, valid: Tensor, times: int) -> list[float]:
    found = []
    for _ in range(times):
        began = time.perf_counter_ns()
        model(x, valid)
        if x.is_cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter_ns() - began) / 1e6)
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sizes = {"batch-size": 8, "seq-len": 128, "d-model": 512, "heads": 8, "ffn-dim": 2048, "layers": 6}
    times = {"accuracy-trials": 5, "seed": 1234, "warmup": 2, "repeats": 5, "benchmark-rounds": 2}
    for name, value in (sizes | times).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, share in {"padding-ratio": 0.0, "input-scale": 1.0, "rtol": 0.02, "atol": 0.002}.items():
        parser.add_argument(f"--{name}", type=float, default=share)
    for name in ("causal", "compile-baseline", "compile-user", "non-strict-weight-copy", "benchmark-on-failure"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--compile-mode", default="default")
    parser.add_argument("--matmul-precision", default="high")
    parser.add_argument("--allow-tf32", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> int:
    args = options()
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    config = TransformerConfig(
        args.batch_size, args.seq_len, args.d_model, args.heads, args.ffn_dim, args.layers, args.causal
    )
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.backends.cuda.matmul.allow_tf32 = args.allow_tf32
    baseline, optimized = BaselineTransformer(config), UserOptimizedTransformer(config)
    copy_model_weights(baseline, optimized, strict=not args.non_strict_weight_copy)
    baseline, optimized = (m.to(device=device, dtype=getattr(torch, args.dtype)).eval() for m in (baseline, optimized))
    if args.compile_baseline:
        baseline = torch.compile(baseline, mode=args.compile_mode)
    if args.compile_user:
        optimized = torch.compile(optimized, mode=args.compile_mode)
    print(f"=== Configuration ===\n{config}\ndevice={device}, dtype={args.dtype}, torch={torch.__version__}")
    if device.type == "cuda":
        print(f"gpu={torch.cuda.get_device_name(device)}")
    print("\n=== Accuracy check ===")
    print(f"criterion: abs_error <= {args.atol:g} OR relative_error <= {args.rtol:.2%}")
    with torch.inference_mode():
        trials = []
        for trial in range(args.accuracy_trials):
            x, valid = rows_and_mask(args, device, args.seed + trial)
            name = f"trial {trial + 1:02d}/{args.accuracy_trials}"
            trials.append(judge(name, optimized(x, valid), baseline(x, valid), args))
        failings, totals, largests, relatives = zip(*trials, strict=True)
        failing, total, largest, relative = sum(failings), sum(totals), max(largests), max(relatives)
        word = "FAIL" if failing else "PASS"
        print(f"summary: {word} | max_abs={largest:.6g} | max_rel={relative:.6g} | failed={failing}/{total}")
        if failing and not args.benchmark_on_failure:
            return 2
        x, valid = rows_and_mask(args, device, args.seed + 100_000)
        times: dict[str, list[float]] = {"baseline ": [], "optimized": []}
        for name, model in (("baseline ", baseline), ("optimized", optimized)):
            time_ms(model, x, valid, args.warmup)
            times[name] += time_ms(model, x, valid, args.repeats * args.benchmark_rounds)
    for name, found in times.items():
        throughput = x.shape[0] * x.shape[1] * 1e3 / statistics.median(found)
        print(
            f"{name}: median={statistics.median(found):.4f} ms | mean={statistics.fmean(found):.4f} ms | "
            f"p90={sorted(found)[int(0.9 * (len(found) - 1))]:.4f} ms | min={min(found):.4f} ms | "
            f"throughput={throughput:.2f} token/s"
        )
    ratio = statistics.median(times["baseline "]) / statistics.median(times["optimized"])
    print(f"speedup  : {ratio:.3f}x based on median latency")
    return 2 if failing else 0


if __name__ == "__main__":
    raise SystemExit(main())
