import cProfile, pstats, sys, time
from convgrad import Problem
from convgrad.plan import plan
lim = None if sys.argv[2]=="None" else int(sys.argv[2])
try: plan("weight_grad bf16 n2 c8 k8 i9x9 w3x3 NHWC OHWI cuda")
except Exception: pass
pr=cProfile.Profile(); pr.enable(); t=time.time()
try: print(plan(Problem.parse(sys.argv[1]), max_workspace_bytes=lim).kernel)
except Exception as e: print(type(e), str(e)[:200])
pr.disable(); print(time.time()-t)
pstats.Stats(pr).sort_stats("cumtime").print_stats(22)
