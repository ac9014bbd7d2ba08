"""The style sheet of the report: system fonts, a light and a dark palette, and shades that never hide the text."""

CSS = """
:root{--paper:#fff;--ink:#1d232b;--quiet:#57606d;--line:#dde2e9;--soft:#f4f6f9;--blue:#2f6fb3;--green:#0f7b5a;
--amber:#a86f00;--red:#b3263c;--heat:#3fae86;--bar:#7aa7d9}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#e6e9ee;--quiet:#a3adba;--line:#323a45;--soft:#1c222a;
--blue:#74aee8;--green:#57c9a0;--amber:#e0b04a;--red:#f0808f;--heat:#1f8f68;--bar:#3f6fa3}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:1.5rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.7rem;margin:0 0 .3rem}h2{font-size:1.25rem;margin:2.2rem 0 .6rem;padding-bottom:.3rem;
border-bottom:1px solid var(--line)}
p{max-width:90ch;margin:.4rem 0 .8rem}
body{overflow-wrap:anywhere}th,td,.badge{overflow-wrap:normal}
a{color:var(--blue)}code,.schedule{font:12.5px/1.4 ui-monospace,Menlo,Consolas,monospace}
.quiet,footer{color:var(--quiet);font-weight:normal}footer{margin-top:2.5rem;font-size:13px}
nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0;list-style:none}
.facts{display:flex;flex-wrap:wrap;gap:.6rem;margin:.8rem 0}
.facts div{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:.5rem .9rem}
.facts dt{font-size:12.5px;color:var(--quiet)}.facts dd{margin:0;font-size:1.25rem;font-weight:600}
.wide{overflow-x:auto;max-width:100%}
.wide:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--blue)}
table{border-collapse:collapse;font-size:13.5px;margin:.3rem 0 1rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.3rem 0;white-space:nowrap}
th,td{padding:.28rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
thead th{color:var(--quiet);font-weight:600;white-space:nowrap;border-bottom-width:2px}
tbody th{font-weight:500;white-space:nowrap}.n{text-align:right;white-space:nowrap}td.n{font-weight:500}
tbody tr:hover{background:var(--soft)}
.schedule b{font-weight:600}.badge{border:1px solid currentColor;border-radius:9px;padding:0 .5em;font-size:12px;
white-space:nowrap}.good{color:var(--green)}.bad{color:var(--red)}
.bar{display:inline-block;width:3.2rem;height:.6em;margin-right:.45em;border-radius:2px;
background:linear-gradient(to right,var(--bar) calc(var(--w)*100%),var(--soft) 0)}
.tiles,.panels{display:flex;flex-wrap:wrap;gap:.6rem 1.6rem;align-items:flex-start}
.tiles>.wide{flex:0 1 auto}
.panels>div{flex:0 1 370px;min-width:280px}
figure{margin:.4rem 0;flex:0 1 370px;min-width:280px}figcaption{font-size:13.5px;color:var(--quiet)}
figcaption b{color:var(--ink)}figure svg{width:100%;height:auto;display:block}
details{border:1px solid var(--line);border-radius:8px;padding:.2rem .9rem;margin:.5rem 0}
summary{cursor:pointer;font-weight:600;padding:.35rem 0}details.inner{border:0;padding:0;margin:0}
details.inner>summary{font-weight:500;font-size:14px}
.heat td,.heat th{padding:.25rem .55rem;text-align:center;border:1px solid var(--line);white-space:nowrap}
.heat td{background:color-mix(in srgb,var(--heat) calc(var(--h,0)*55%),transparent)}
.heat td.none,.heat td.corner{background:none;color:var(--quiet)}.heat td.corner{font-size:12px}
.heat tbody tr:hover{background:none}
.legend span{margin-right:1.3rem;white-space:nowrap;font-size:13.5px}
.legend svg{width:24px;height:12px;margin-right:.4em;vertical-align:middle}
svg text{fill:var(--quiet);font:11px system-ui,sans-serif}svg path{fill:none}
.grid{stroke:var(--line)}.axis{stroke:var(--quiet)}.dot{stroke:var(--blue);opacity:.75}
.best{stroke:var(--green);stroke-width:2}.best-dot{stroke:var(--green)}
.default{stroke:var(--amber);stroke-width:1.5;stroke-dasharray:5 4}
.rule{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:1.5 3}
.failed{stroke:var(--red);stroke-width:1.6}
@media print{details>*{display:block}body{max-width:none}}
""".strip()
