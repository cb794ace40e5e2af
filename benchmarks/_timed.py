import pathlib
s=pathlib.Path("gradwire/kernels/topk_triton.py").read_text()
def rep(a,b,n=1):
    global s
    assert s.count(a)>=1,a
    s=s.replace(a,b,n)
T="tl.extra.cuda.globaltimer()"
rep("def _first(\n    work,","def _first(\n    stamps, work,")
rep("            _first(\n                w,","            _first(\n                stamps, w,")
rep("def _topk(\n    work,","def _topk(\n    stamps, work,")
rep("    t, shift = aim(maxima, n, rank, crowd, SAMPLE)\n    clear(work + FINE, 1 << shift, item",f"    tl.store(stamps + item * 64 + 1, {T})\n    t, shift = aim(maxima, n, rank, crowd, SAMPLE)\n    tl.store(stamps + item * 64 + 2, {T} + (t >> 31))\n    clear(work + FINE, 1 << shift, item")
rep("        w = work + zero\n",f"        tl.store(stamps + item * 64 + phase * 8 + 8, {T} + zero)\n        w = work + zero\n")
rep("        if busy:\n            finish(work)\n",f"        tl.store(stamps + item * 64 + phase * 8 + 9, {T})\n        if busy:\n            finish(work)\n")
rep("    number = take(work)\n    busy",f"    begin = {T}\n    number = take(work)\n    tl.store(stamps + number * 64, begin)\n    busy")
rep("                if way == BY_BINS:\n                    narrow(",f"                tl.store(stamps + item * 64 + 18, {T} + (bin >> 31))\n                if way == BY_BINS:\n                    narrow(")
rep("def _last(\n    work,","def _last(\n    stamps, work,")
rep("                        _last(\n                            w,","                        _last(\n                            stamps, w,") if "                        _last(\n                            w," in s else rep("_last(w, cand","_last(stamps, w, cand")
rep("    edge = t + (bin",f"    tl.store(stamps + item * 64 + 26, {T} + (low >> 31))\n    edge = t + (bin")
rep("p.items, key, u, work, u, ruling, room, indices","p.items, key, u, STAMPS, work, u, ruling, room, indices")
pathlib.Path("gradwire/kernels/timed_triton.py").write_text(s)
