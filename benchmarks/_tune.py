import torch, time, sys, statistics, itertools, subprocess
import triton
from gradwire.kernels import topk_triton as K, scan_triton as S
from gradwire.kernels.topk_torch import topk_torch
from gradwire import kernels
from gradwire.bench.compress import Sets, Step, _floor
from gradwire.bench.clock import measure
dev=torch.device("cuda",0)
torch.set_grad_enabled(False)
def say(*a): print(*a,flush=True)
def prof(calls,n=20):
    from torch.profiler import profile, ProfilerActivity
    for c in itertools.islice(itertools.cycle(calls),6): c()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for c in itertools.islice(itertools.cycle(calls),n): c()
        torch.cuda.synchronize()
    d={}
    for e in p.events():
        if e.device_type==torch.autograd.DeviceType.CUDA: d.setdefault(e.name[:28],[]).append(e.device_time if hasattr(e,"device_time") else e.cuda_time)
    return {k:(round(statistics.median(v),1),len(v)//n) for k,v in d.items()}
def gpu_time(calls,n=30):
    """graph replay of each call, queue kept full"""
    return prof(calls,n)
from gradwire.kernels import plan_triton as PL
from gradwire.kernels.workspace_triton import counters
def setp(**kw):
    for k,v in kw.items():
        if k=="WARPS": K._launch_topk._options["num_warps"]=v
        elif k=="PW": K._launch_prune._options["num_warps"]=v
        elif k=="PREGS": K._launch_prune._options["maxnreg"]=v
        elif k=="BW": K._launch_bound._options["num_warps"]=v
        else: setattr(PL,k,v); setattr(K,k,v)
    PL.plan.cache_clear(); [x._compiled.clear() for x in (K._launch_topk,K._launch_prune,K._launch_bound)]
def sanity():
    for d,k in ((6_553_600,6554),(25_557_032,25557),(25_557_032,255570),(6_553_600,400000)):
        u=torch.randn(d,device=dev); g=K.group_size(d,k,dev)
        m=S.group_maxima(u,g) if g else None
        t=time.time(); i,v=K.topk_triton(u,k,m,g); torch.cuda.synchronize(); c=time.time()-t
        ref=topk_torch(u,k)
        say("sanity",d,k,g,torch.equal(i,ref),torch.equal(v,u[ref.long()]),"way",counters(dev)[162].item(),"compile %.1fs"%c)
    for u in (torch.ones(25_557_032,device=dev),torch.randn(25_557_032,device=dev)*(torch.rand(25_557_032,device=dev)<3e-4)):
        calls=[lambda: K.topk_triton(u,25557)]; i,v=calls[0](); say("ties",torch.equal(i,topk_torch(u,25557)), counters(dev)[162].item(), prof(calls,5))
def variants(size,density,VARS):
    k=round(size*density); g=K.group_size(size,k,dev)
    us=[torch.randn(size,device=dev) for _ in range(max(2,300_000_000//(4*size)))]; ms=[S.group_maxima(u,g) if g else None for u in us]
    for v in VARS:
        setp(**v)
        calls=[lambda u=u,m=m: K.topk_triton(u,k,m,g) for u,m in zip(us,ms)]
        try:
            t=time.time(); r=prof(calls,20); i,_=calls[0]()
            say(" topk",size,density,"G",g,v,r,"ok",torch.equal(i,topk_torch(us[0],k)),"(%.1fs)"%(time.time()-t))
        except Exception as e: say(" fail",v,repr(e)[:150])
def steps(size,density=0.001):
    sets=Sets(size,dev)
    st=[Step(b,g,"topk",density,sets.never) for b,g in sets]
    fl=measure(_floor(sets),dev,40,5); tm=measure(st,dev,40,10)
    for s in st: s()
    torch.cuda.synchronize(); t=time.perf_counter()
    for i in range(20): st[i%len(st)]()
    cpu=(time.perf_counter()-t)/20*1e6; torch.cuda.synchronize()
    say("step",size,density,"floor %.4f step %.4f ratio %.3f (p20 %.4f p80 %.4f) cpu %.1f us"%(fl.ms,tm.ms,tm.ms/fl.ms,tm.p20,tm.p80,cpu), prof(st))
def timed(size,density=0.001):
    subprocess.run([sys.executable,"benchmarks/_timed.py"],check=True)
    import gradwire.kernels.timed_triton as Z
    k=round(size*density); g=Z.group_size(size,k,dev)
    us=[torch.randn(size,device=dev) for _ in range(max(1,300_000_000//(4*size)))]; ms=[S.group_maxima(u,g) for u in us]
    for r in range(6):
        Z.STAMPS=torch.zeros(2048*64,dtype=torch.int64,device=dev)
        Z.topk_triton(us[r%len(us)],k,ms[r%len(us)],g)
    torch.cuda.synchronize()
    p=PL.plan(size,k,g,132); say({i:None for i in ()} or '',end='') if 0 else None; s=Z.STAMPS.view(-1,64)[:p.items].cpu()
    t0=s[:,0][s[:,0]>0].min().item()
    names=[(0,"start"),(8,"p0 go"),(1,"cleared"),(2,"bound"),(9,"p0 end"),(16,"p1 go"),(18,"find"),(17,"p1 end"),(24,"p2 go"),(26,"find"),(25,"p2 end")]
    say("timed",size,density,p); say("   "," ".join(f"{n}:{((s[:,c]-t0).float()).min().item()/1e3:.1f}/{((s[:,c]-t0).float()).median().item()/1e3:.1f}/{((s[:,c]-t0).float()).max().item()/1e3:.1f}" for c,n in names))
def cpu(name,f,n=200):
    for _ in range(5): f()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): f()
    c=(time.perf_counter()-t)/n*1e6; torch.cuda.synchronize(); say("   cpu %-28s %.2f us"%(name,c))
def micro():
    import triton.language as tl
    x=torch.zeros(1024,device=dev); y=torch.zeros(1024,device=dev); f=torch.zeros((),dtype=torch.bool,device=dev)
    cpu("python noop",lambda:None); cpu("add_",lambda:x.add_(y)); cpu("empty",lambda:torch.empty(1000,device=dev)); cpu("empty int32 kw",lambda:torch.empty(1000,dtype=torch.int32,device=dev))
    cpu("new_empty",lambda:x.new_empty(1000)); cpu("slice",lambda:x[:1000]); cpu("ones bool",lambda:torch.ones((),dtype=torch.bool,device=dev)); cpu("zero_",lambda:x.zero_())
    cpu("capturing?",lambda:torch.cuda.is_current_stream_capturing()); cpu("current_stream",lambda:torch.cuda.current_stream(dev).cuda_stream)
    cpu("raw stream",lambda:torch._C._cuda_getCurrentRawStream(0))
    from gradwire.kernels.settle_triton import _settle, settle_triton
    b=torch.zeros(6553601,device=dev); i=torch.arange(6554,device=dev).int(); v=torch.zeros(6554,device=dev)
    cpu("settle",lambda:settle_triton(b,i,v,f))
    import cProfile,pstats
    sets=Sets(6553600,dev); stp=[Step(b,g,"topk",.001,sets.never) for b,g in sets]
    for s_ in stp: s_()
    pr=cProfile.Profile(); pr.enable()
    for j in range(100): stp[j%len(stp)]()
    pr.disable(); torch.cuda.synchronize()
    import io; o=io.StringIO(); pstats.Stats(pr,stream=o).sort_stats("tottime").print_stats(28); say(o.getvalue()[:4500])
if __name__=="__main__":
    say(torch.__version__,triton.__version__,torch.cuda.get_device_name())
    for a in sys.argv[1:]:
        t=time.time()
        try: eval(a)
        except Exception as e:
            import traceback; traceback.print_exc()
        say("   [%s took %.1fs]"%(a,time.time()-t))
