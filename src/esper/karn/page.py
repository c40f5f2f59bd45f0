"""The frame of a report: its HTML and its style, without a word from outside."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
{head}
<nav>{links}</nav>
{body}
</body></html>
"""
STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#24292f;--dim:#57606a;--grid:#e3e7eb;--holds:#1a7f37;
--fails:#cf222e;--refused:#9a6700;--c1:#2563eb;--c2:#d9730d;--c3:#8b44c9;--c4:#0f8a83;--c5:#c2347a;
--c6:#7a5c3a}
@media screen and (prefers-color-scheme:dark){:root{--paper:#15191e;--ink:#e6e9ed;--dim:#9aa4af;
--grid:#2c333b;--holds:#56d364;--fails:#ff7b72;--refused:#e3b341;--c1:#6ea8fe;--c2:#f2a35e;--c3:#c39bf0;
--c4:#4fc4bb;--c5:#f07fb4;--c6:#c9a77f}}
body{max-width:1120px;margin:0 auto;padding:16px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}h1{font-size:22px;margin:8px 0}h2{font-size:19px;margin:40px 0 4px}
h3{font-size:15px;margin:20px 0 4px}h4{font-size:13px;margin:0}
.verdict{font-size:26px;line-height:1.25;font-weight:600;margin:12px 0;padding-left:14px;
border-left:6px solid}.holds,.kept{color:var(--holds)}.fails,.pruned{color:var(--fails)}
.refused{color:var(--refused)}td .holds,td .fails,td .refused{font-weight:600}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:6px 20px;font-size:13px}
dt,.note,.reported,.unfinished{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
.note{font-size:13px;margin:2px 0 8px}nav{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px}
a{color:var(--c1)}summary{cursor:pointer;padding:6px 0}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid var(--grid);text-align:left;vertical-align:top}
td:first-child{min-width:70px}th{color:var(--dim);font-weight:500;vertical-align:bottom}.n{text-align:right}
td.n{white-space:nowrap}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;padding:0;margin:4px 0;font-size:13px}
.legend i{display:inline-block;width:12px;height:12px;margin-right:6px;border-radius:2px;
background:currentColor}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:0 24px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(180px,45%),1fr));gap:16px 20px;
align-items:end}.plot{padding:22px 14px 36px 0}.grid .plot{padding:16px 0 14px}
svg{display:block;overflow:visible}
text{font-size:11px;fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.dim{fill:var(--dim)}.grid text{stroke:none}.strong{fill:var(--paper)}.subject{font-weight:700}
.empty{fill:var(--grid)}.cell{fill:color-mix(in srgb,var(--c1) calc(100%*var(--share)),var(--grid))}
.pale{opacity:.35}rect,circle,polygon{fill:currentColor}polygon{opacity:.15}
line,polyline{stroke:currentColor;fill:none;stroke-width:1.5}.dashed:is(line,polyline){stroke-dasharray:5 3}
.legend .dashed{background:repeating-linear-gradient(90deg,currentColor 0 4px,transparent 4px 6px)}
line.grid{stroke:var(--grid);stroke-width:1}.zero,.axis,.lead{stroke:var(--dim);stroke-width:1}
.front{color:var(--c1)}circle.hollow{fill:var(--paper);stroke:currentColor;stroke-width:1.5}
.c0{color:var(--ink)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.c5{color:var(--c5)}.c6{color:var(--c6)}
@media print{body{zoom:.75;max-width:none}nav{display:none}.wide{overflow:visible}
h2,h3,summary,.note,.legend{break-after:avoid}.grid>div,.plot,tr{break-inside:avoid}
details::details-content{content-visibility:visible}}
"""
