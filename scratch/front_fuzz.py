"""Random small problems through the compiler's front end only: types that depend on arguments being 1."""
import random, sys, time, collections, os
sys.argv=[sys.argv[0]]+sys.argv[1:]
seed, seconds = int(sys.argv[1]), float(sys.argv[2])
import torch
from triton import knobs
from triton.runtime.driver import driver
from convgrad import Problem, Unsupported
from convgrad.backends.triton import ahead, launch
driver.set_active(ahead.NoDriver(("cuda", 90, 32)))
class Done(Exception): pass
def hook(backend, stages, options, language, capability):
    names=list(stages)
    def stop(*a): raise Done
    for n in names[1:]: stages[n]=stop
    first=stages[names[0]]
    def only(src, meta): raise Done
    stages[names[0]]=only
knobs.runtime.add_stages_inspection_hook=hook
knobs.compilation.always_compile=True
seen=set()
def compiled(self, first, l):
    try:
        self.kernel.warmup(*first, *l.scalars, grid=l.grid, **l.constants, **l.options)
    except Done: pass
orig_call = launch.Step.__call__
def call(self, *tensors):
    l = self.describe(*tensors)
    if 0 in l.grid: return
    first = l.leading(*tensors) if l.leading else tensors
    from triton.runtime.jit import MockTensor
    first = tuple(MockTensor(v.dtype) if isinstance(v, torch.Tensor) else v for v in first)
    names.append(self.kernel.__name__ if hasattr(self.kernel,'__name__') else str(self.kernel))
    compiled(self, first, l)
launch.Step.__call__=call
names=[]
r=random.Random(seed)
def problem():
    axes=r.choice([1,2,2,3])
    w=[r.choice([1,1,2,3]) for _ in range(axes)]; s=[r.choice([1,1,2,3]) for _ in range(axes)]; d=[r.choice([1,1,2]) for _ in range(axes)]
    p=[(r.choice([0,0,1,2]),r.choice([0,1,2])) for _ in range(axes)]
    i=[]
    for a in range(axes):
        i.append(max(1, d[a]*(w[a]-1)+1-sum(p[a]))+r.choice([0,0,0,1,2,7,r.randrange(30)]))
    kind=r.choice(["dense","dw","group","odd","few","one"])
    if kind=="dw": c=k=g=r.choice([2,8,16,24,64])
    elif kind=="group": g=r.choice([2,4,32]); c=g*r.choice([1,2,4,8,16,32]); k=g*r.choice([1,2,4,8,16,32])
    elif kind=="odd": g=r.choice([1,3]); c=g*r.choice([1,3,7,17]); k=g*r.choice([1,3,5,33])
    elif kind=="few": g=1; c,k=r.choice([(1,64),(3,64),(64,1),(64,3),(8,1),(2,128),(8,64)])
    elif kind=="one": g=1; c=r.choice([1,1,16]); k=r.choice([1,1,16])
    else: g=1; c=r.choice([8,16,64,128]); k=r.choice([8,16,64,128])
    n=r.choice([1,1,2,8,16,64])
    wrt=r.choice(["conv","input_grad","weight_grad","bias_grad","input_grad+weight_grad+bias_grad"])
    lay=r.choice([("NLC","NHWC","NDHWC")]*2+[("","","")])[axes-1]
    wl=r.choice([("OLI","OHWI","ODHWI")]*2+[("","",""),("LIO","HWIO","DHWIO")])[axes-1]
    fmt=r.choice(["bf16","f16","f32","f64","e4m3>f32","e5m2>bf16","e4m3","hif8>f32","hif8","bf16>f32"])
    return " ".join(x for x in [wrt,fmt,f"n{n}",f"c{c}",f"k{k}","i"+"x".join(map(str,i)),"w"+"x".join(map(str,w)),"s"+"x".join(map(str,s)),"p"+"x".join(f"{a}:{b}" for a,b in p),"d"+"x".join(map(str,d)),f"g{g}",lay,wl,"cuda"] if x)
end=time.time()+seconds; n=0; count=collections.Counter()
while time.time()<end:
    t=problem(); names.clear(); p=Problem.parse(t)
    try:
        for plan in ahead.plans_of(p,None):
            a=plan.problem
            run=getattr(plan.run,'__wrapped__',plan.run)
            plan.run(tuple(ahead.empty_tensor(a,x,a.dtype,"meta") for x in a.operands), tuple(ahead.empty_tensor(a,x,a.out_dtype,"meta") for x in a.results), None)
    except Unsupported: continue
    except Exception as e:
        print("BAD", t, names[-1:], type(e).__name__, str(e).replace("\n"," ")[-260:], flush=True)
    n+=1
    for x in names: count[x]+=1
print(n, dict(count))
