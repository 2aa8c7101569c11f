import os, time, torch, weft
from tests.process.harness import spawn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def child(strategies):
    out=[]
    base=os.environ["WEFT_STORE"]
    for k,s in enumerate(strategies):
        t=time.perf_counter()
        os.environ["WEFT_STORE"]=f"{base}-{k}"
        run=weft.init(s)
        torch.manual_seed(0)
        m=nn.Sequential(nn.Linear(6,8),nn.Tanh(),nn.Linear(8,8),nn.Tanh(),nn.Linear(8,3)).double()
        opt=torch.optim.SGD(m.parameters(),lr=0.1,momentum=0.9)
        m,opt=run.distribute(m,opt)
        x=torch.randn(96,6,dtype=torch.float64); y=torch.randn(96,3,dtype=torch.float64)
        for a,b in run.shard(DataLoader(TensorDataset(x,y),batch_size=4)):
            l=((m(a)-b)**2).mean(); l.backward(); opt.step(); opt.zero_grad()
        out.append((sum(p.sum().item() for p in m.parameters()), run.step, time.perf_counter()-t))
        run.close()
    return out
if __name__=="__main__":
    for n,w in ((4,4),(1,4),(2,4),(3,4)):
        t=time.perf_counter()
        r=spawn(n,child,["sequential","wfbp","fused(bucket=256B)","ring / fused(bucket=256B)","halving_doubling"],workers=w)
        print(n,time.perf_counter()-t); 
        for row in r: print(row)
