import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES  # noqa: E402

import tpsgd  # noqa: E402

folder = Path(sys.argv[1])
for name, case in CASES.items():
    weights, run = case.train(parallel=tpsgd.data_parallel())
    e, r = case.train()
    d=max(float((weights[k]-e[k]).abs().max()) for k in e)
    h=max(abs(a.loss-b.loss) for a,b in zip(run.history,r.history)); m=len(run.history)==len(r.history) and run.sample_passes==r.sample_passes and run.forward_passes==r.forward_passes
    acc=[(a.accuracy,a.val_accuracy) for a in run.history]==[(a.accuracy,a.val_accuracy) for a in r.history]
    print(f"{name:30} {d:.1e} {h:.1e} {m} {acc} {len(run.history)}", "" if d<1e-10 and h<1e-7 and m and acc else "<<<", flush=True)
