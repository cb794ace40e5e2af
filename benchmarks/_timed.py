import pathlib
s=pathlib.Path("gradwire/kernels/topk_triton.py").read_text()
def rep(a,b,n=1):
    global s
    assert s.count(a)>=1,a
    s=s.replace(a,b,n)
T="tl.extra.cuda.globaltimer()"
rep("def _prune(\n    work,","def _prune(\n    stamps, work,")
rep("            _prune(\n                w,","            _prune(\n                stamps, w,")
rep("def _topk(\n    work,","def _topk(\n    stamps, work,")
rep("    t, seen, largest = bound(",f"    tl.store(stamps + item * 64 + 1, {T})\n    t, seen, largest = bound(")
rep("    found = 0\n    base = item * room",f"    tl.store(stamps + item * 64 + 2, {T} + (t >> 31))\n    found = 0\n    base = item * room")
rep("            tl.debug_barrier()\n        counted = 0",f"            tl.debug_barrier()\n        tl.store(stamps + item * 64 + 3, {T} + (groups >> 31))\n        counted = 0")
rep("        tl.atomic_add(work + TOTAL, found, sem=\"relaxed\")",f"        tl.store(stamps + item * 64 + 4, {T} + (found >> 31))\n        tl.atomic_add(work + TOTAL, found, sem=\"relaxed\")")
rep("        w = work + zero\n",f"        tl.store(stamps + item * 64 + phase * 8 + 8, {T} + zero)\n        w = work + zero\n")
rep("        if busy:\n            finish(work)\n",f"        tl.store(stamps + item * 64 + phase * 8 + 9, {T})\n        if busy:\n            finish(work)\n")
rep("    number = take(work)\n    busy",f"    begin = {T}\n    number = take(work)\n    tl.store(stamps + number * 64, begin)\n    busy")
rep("                if way == BY_BINS:\n                    narrow(",f"                tl.store(stamps + item * 64 + 18, {T} + (bin >> 31))\n                if way == BY_BINS:\n                    narrow(")
rep("                        edge = t + (bin",f"                        tl.store(stamps + item * 64 + 26, {T} + (low >> 31))\n                        edge = t + (bin")
rep("        u,\n        counters(device),","        u,\n        STAMPS,\n        counters(device),") if "        u,\n        counters(device)," in s else rep("p.items, key, u, counters(device)","p.items, key, u, STAMPS, counters(device)")
pathlib.Path("gradwire/kernels/timed_triton.py").write_text(s)
