import random, sys, time, traceback, collections, signal
from convgrad import Problem, Unsupported
from convgrad.plan import plan
import sys as _s; cp=_s.modules["convgrad.plan"]
FMT = ["bf16","f16","f32","f64","e4m3>f32","e5m2>bf16","e4m3","hif8>f32","hif8","bf16>f32","f16>f32"]
def problem(r):
    axes = r.choice([1,1,2,2,3])
    w=[r.choice([1,1,2,3,3,5,7,31]) for _ in range(axes)]
    s=[r.choice([1,1,1,2,3,4,7,100]) for _ in range(axes)]
    d=[r.choice([1,1,1,2,3,64]) for _ in range(axes)]
    p=[(r.choice([0,0,1,2,5]),r.choice([0,1,2,5])) for _ in range(axes)]
    top={1:[1,9,100,4000,160000,3000000],2:[1,7,28,224,1500],3:[1,5,16,64,300]}[axes]
    i=[]
    for a in range(axes):
        least=max(0, d[a]*(w[a]-1)+1-sum(p[a]))
        i.append(least+r.choice([0,0,1,r.randrange(r.choice(top)+1)]))
    kind=r.choice(["dense","dense","dw","group","odd","few"])
    if kind=="dw": c=k=g=r.choice([1,2,8,24,64,96,512,4096])
    elif kind=="group": g=r.choice([2,4,32,128]); c=g*r.choice([1,2,4,8,16,64]); k=g*r.choice([1,2,4,8,16,64])
    elif kind=="odd": g=r.choice([1,3,5]); c=g*r.choice([1,3,7,17,85]); k=g*r.choice([1,3,5,33])
    elif kind=="few": g=1; c,k=r.choice([(1,64),(3,64),(64,1),(64,3),(8,1),(1,1),(2,128)])
    else: g=1; c=r.choice([8,16,64,100,256,2048]); k=r.choice([8,16,64,100,256,2048])
    n=r.choice([0,1,2,3,8,16,64,256,5000])
    wrt=r.choice(["conv","input_grad","weight_grad","bias_grad","weight_grad","weight_grad+bias_grad","input_grad+weight_grad","input_grad+weight_grad+bias_grad"])
    lay=r.choice([("NLC","NHWC","NDHWC"),("NLC","NHWC","NDHWC"),("","","")])[axes-1]
    wl=r.choice([("OLI","OHWI","ODHWI"),("OLI","OHWI","ODHWI"),("","",""),("LIO","HWIO","DHWIO")])[axes-1]
    return " ".join(x for x in [wrt,r.choice(FMT),f"n{n}",f"c{c}",f"k{k}","i"+"x".join(map(str,i)),"w"+"x".join(map(str,w)),"s"+"x".join(map(str,s)),"p"+"x".join(f"{a}:{b}" for a,b in p),"d"+"x".join(map(str,d)),f"g{g}",lay,wl,"cuda"] if x)
class Slow(Exception): pass
def alarm(*a): raise Slow
signal.signal(signal.SIGVTALRM, alarm)
def main():
    seed, seconds = int(sys.argv[1]), float(sys.argv[2])
    r=random.Random(seed); end=time.time()+seconds; n=0; bad=collections.Counter(); times=[]
    while time.time()<end:
        text=problem(r); lim=r.choice([None,None,0,1,100,4096,10**5,10**6,10**7,r.randrange(10**8)])
        try: p=Problem.parse(text)
        except ValueError as e: continue
        n+=1; cp._cache.clear()
        t=time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, 5.0)
        try:
            got=plan(p, max_workspace_bytes=lim)
            verdict="ok"
        except Unsupported as e: verdict="unsupported"
        except Slow:
            verdict="slow5 "+traceback.format_exc().splitlines()[-3].strip()
            print("SLOW", text, lim, verdict, flush=True)
        except Exception as e:
            tb=traceback.extract_tb(e.__traceback__)[-1]
            verdict=f"{type(e).__name__} {tb.filename.split('/')[-1]}:{tb.lineno}"
            print("BAD", text, lim, verdict, flush=True)
        finally: signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        dt=time.process_time()-t
        times.append((dt,text,lim))
        bad[verdict.split(" ")[0] if verdict in("ok","unsupported") else verdict]+=1
    times.sort(reverse=True)
    print(n, dict(bad))
    for dt,text,lim in times[:25]: print(f"{dt*1e3:8.0f} ms", text, lim)
    print("median ms", times[len(times)//2][0]*1e3, "p90", times[len(times)//10][0]*1e3, "p99", times[len(times)//100][0]*1e3)
main()
