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
def sanity():
    for d,k in ((6_553_600,6554),(25_557_032,25557),(25_557_032,255570),(6_553_600,400000)):
        u=torch.randn(d,device=dev); g=K.group_size(d,k,dev)
        m=S.group_maxima(u,g) if g else None
        t=time.time(); i,v=K.topk_triton(u,k,m,g); torch.cuda.synchronize(); c=time.time()-t
        ref=topk_torch(u,k)
        w=K.workspace(dev)
        say("sanity",d,k,g,torch.equal(i,ref),torch.equal(v,u[ref.long()]),"path",w[161].item(),"compile %.1fs"%c)
    u=torch.ones(6_553_600,device=dev); i,v=K.topk_triton(u,6554); say("all equal",torch.equal(i,topk_torch(u,6554)), K.workspace(dev)[161].item())
def scans(size):
    sets=Sets(size,dev); n=len(list(sets))
    fl=measure(_floor(sets),dev,30,5); say("floor",size,fl)
    for T,w in ((2048,4),(2048,8),(4096,8),(4096,16),(8192,16),(1024,4)):
        S.TILE,S.WARPS=T,w
        calls=[lambda b=b,g=g: S.scan_triton(b.u,[(0,g)],b._maxima[:b.size//32],32) for b,g in sets]
        r=prof(calls); say(" scan T",T,"w",w,{k:v for k,v in r.items() if "scan" in k}, "adds",)
    S.TILE,S.WARPS=4096,8
    say(" add_",prof(_floor(sets)))
def variants(size,density):
    sets=Sets(size,dev); k=round(size*density); g=K.group_size(size,k,dev) or 1
    us=[]
    for b,gr in sets:
        b.buffer[:size].copy_(gr); m=S.group_maxima(b.u,g) if g>1 else None; us.append((b.u,m))
    us=us[:len(sets.bundles)]
    for w,per,tile,ga,mr,smp in VARS:
        K.WARPS,K.PROGRAMS,K.TILE,K.GATHER,K.REGISTERS,K.SAMPLE=w,per,tile,ga,mr,smp
        K.plan.cache_clear()
        calls=[lambda u=u,m=m: K.topk_triton(u,k,m,g if m is not None else 0) for u,m in us]
        try:
            t=time.time(); r=prof(calls,20)
            say(" topk",size,density,"G",g,"warps",w,"per",per,"tile",tile,"gather",ga,"maxnreg",mr,"sample",smp,{a:b for a,b in r.items() if "topk" in a},"(%.1fs)"%(time.time()-t))
        except Exception as e: say(" fail",w,per,tile,ga,mr,repr(e)[:150])
VARS=[(16,1,4096,4096,None,8192),(16,1,2048,2048,None,8192),(16,2,2048,2048,64,8192),(16,2,4096,4096,64,8192),(32,1,4096,4096,None,8192),(8,2,2048,2048,None,8192),(8,4,1024,1024,64,4096)]
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
    Z.WARPS,Z.PROGRAMS,Z.TILE,Z.GATHER,Z.REGISTERS,Z.SAMPLE=BEST
    k=round(size*density); g=Z.group_size(size,k,dev)
    us=[torch.randn(size,device=dev) for _ in range(max(1,300_000_000//(4*size)))]; ms=[S.group_maxima(u,g) for u in us]
    for r in range(6):
        Z.STAMPS=torch.zeros(2048*64,dtype=torch.int64,device=dev)
        Z.topk_triton(us[r%len(us)],k,ms[r%len(us)],g)
    torch.cuda.synchronize()
    p=Z.plan(size,k,g,132); s=Z.STAMPS.view(-1,64)[:p.items].cpu()
    t0=s[:,0][s[:,0]>0].min().item()
    names=[(0,"start"),(8,"p0 go"),(1,"cleared"),(2,"bound"),(3,"compact"),(4,"gather"),(9,"p0 end"),(16,"p1 go"),(18,"find"),(17,"p1 end"),(24,"p2 go"),(26,"find"),(25,"p2 end")]
    say("timed",size,density,BEST,p); say("   "," ".join(f"{n}:{(s[:,c].float().mul(0).add((s[:,c]-t0).float())).min().item()/1e3:.1f}/{((s[:,c]-t0).float()).median().item()/1e3:.1f}/{((s[:,c]-t0).float()).max().item()/1e3:.1f}" for c,n in names))
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
    g=(26,)
    cpu("settle jit",lambda:_settle[g](b,i,v,f,6554,6553600,256,num_warps=4,enable_fp_fusion=False))
    k=_settle.warmup(b,i,v,f,6554,6553600,256,num_warps=4,enable_fp_fusion=False,grid=g)
    k._init_handles() if hasattr(k,"_init_handles") else None
    st=torch._C._cuda_getCurrentRawStream(0)
    say(type(k), [a for a in dir(k) if not a.startswith("__")])
    try:
        cpu("compiled[grid]",lambda:k[g](b,i,v,f,6554,6553600,256))
        cpu("compiled.run",lambda:k.run(26,1,1,st,k.function,k.packed_metadata,None,None,None,b,i,v,f,6554,6553600,256))
        import inspect; say(type(k.run)); 
        say(inspect.getsource(type(k.run)))
    except Exception as e: say(repr(e)[:300])
    import cProfile,pstats
    sets=Sets(6553600,dev); stp=[Step(b,g,"topk",.001,sets.never) for b,g in sets]
    for s_ in stp: s_()
    pr=cProfile.Profile(); pr.enable()
    for j in range(100): stp[j%len(stp)]()
    pr.disable(); torch.cuda.synchronize()
    import io; o=io.StringIO(); pstats.Stats(pr,stream=o).sort_stats("tottime").print_stats(28); say(o.getvalue()[:4500])
BEST=(16,1,4096,4096,None,8192)
if __name__=="__main__":
    say(torch.__version__,triton.__version__,torch.cuda.get_device_name())
    for a in sys.argv[1:]:
        t=time.time()
        try: eval(a)
        except Exception as e:
            import traceback; traceback.print_exc()
        say("   [%s took %.1fs]"%(a,time.time()-t))
