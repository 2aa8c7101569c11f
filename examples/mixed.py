"""What a longer loop needs: parameter groups, a schedule, clipping, gradients accumulated over two batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

run = weft.init("bsp / direct / error_feedback(topk(ratio=0.1))")
x = torch.randn(4096, 20)
y = (x @ torch.randn(20, 1)).sin()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
for i, (inputs, targets) in enumerate(run.shard(loader)):
    loss = nn.functional.mse_loss(model(inputs), targets) / 2
    if i % 2 == 0:
        with run.accumulate():
            loss.backward()
        continue
    loss.backward()
    run.clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    run.log(loss=loss)
if run.is_main:
    print(f"{run.workers} workers, {run.step} steps")
