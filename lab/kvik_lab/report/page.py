"""Styles and script of the HTML page."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5a6570; --paper: #ffffff; --line: #d9dee3;
  --panel: #f5f7f9; --link: #005a9c; --yes: #11734b; --no: #b3261e; --open: #8a5a00; --same: #4a4fa3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa7b3; --paper: #15191d;
  --line: #343c44; --panel: #1d2329; --link: #7cb8f2; --yes: #5fd39d; --no: #ff8a80; --open: #f0b94d;
  --same: #a9aef7; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; }
body { margin: 0; display: grid; grid-template-columns: 15rem minmax(0, 1fr); background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: 2rem 1.25rem;
  font-size: .875rem; border-right: 1px solid var(--line); min-height: 100vh; }
nav ol { padding-left: 1.25rem; margin: .5rem 0; } nav li { margin: .35rem 0; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
main { padding: 2rem 2.5rem 4rem; max-width: 68rem; min-width: 0; width: 100%; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.35rem; margin: 2.75rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
p { max-width: 46rem; margin: .6rem 0; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; padding: 0; break-inside: avoid; }
figcaption, caption { font-weight: 600; text-align: left; margin-bottom: .35rem; overflow-wrap: anywhere; }
.plot { width: 100%; min-height: 10rem; }
details { font-size: .875rem; margin-top: .25rem; } summary { cursor: pointer; color: var(--soft); }
.table { overflow-x: auto; margin: 1rem 0; } details .table { max-height: 30rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  max-width: 26rem; overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 600; background: var(--panel); position: sticky; top: 0; }
td.number { text-align: right; white-space: nowrap; }
td.missing { color: var(--soft); font-style: italic; }
.answer { margin-bottom: 2rem; }
.answer .question { color: var(--soft); margin: 0 0 .25rem; }
.answer .sentence { font-size: 1.3rem; line-height: 1.35; font-weight: 600; max-width: 58rem;
  margin: 0 0 .75rem; }
.answer h3 { font-size: .875rem; margin: 0 0 .2rem; color: var(--soft); }
.answer .three { display: grid; grid-template-columns: 1fr 1fr 1.1fr; gap: 1.5rem; margin-top: 1rem;
  font-size: .875rem; }
.answer .three p { margin: 0; }
.strip { overflow-x: auto; }
.strip table { width: 100%; font-size: .9rem; }
.strip th[scope=row] { background: none; color: var(--ink); position: static; white-space: nowrap; }
.strip th { position: static; background: none; font-weight: 400; }
.strip td { vertical-align: middle; } .strip td.bar { width: 32%; min-width: 9rem; }
.strip .ends { display: flex; justify-content: space-between; gap: 1rem; } th.number { text-align: right; }
.strip td.said { min-width: 14rem; max-width: none; }
.strip .big { font-weight: 600; } .strip small { color: var(--soft); white-space: nowrap; }
.strip .because { margin: .15rem 0 0; }
.strip svg { width: 100%; height: 1.1rem; display: block; }
.strip svg line { vector-effect: non-scaling-stroke; stroke: var(--link); }
.strip svg .zero { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 2; }
.strip svg .interval { stroke-width: 3; } .strip svg .point { stroke-width: 2; }
.strip svg .open { stroke: var(--open); } .strip td.open { color: var(--open); }
.strip svg .same { stroke: var(--same); } .strip td.same { color: var(--same); }
.note, .because { font-size: .875rem; color: var(--soft); }
.claim { border-left: 4px solid var(--tone); background: var(--panel); padding: .6rem 1rem; margin: .8rem 0;
  break-inside: avoid; border-radius: 0 6px 6px 0; }
.claim p { margin: 0 0 .3rem; }
.claim .id { font: .8rem ui-monospace, monospace; color: var(--soft); margin-right: .35rem; }
.verdict { display: inline-block; color: var(--tone); border: 1px solid var(--tone); border-radius: 1rem;
  padding: 0 .6rem; font-size: .8rem; font-weight: 600; white-space: nowrap; margin-left: .35rem; }
.claim.yes { --tone: var(--yes); } .claim.no { --tone: var(--no); }
.claim.open { --tone: var(--open); } .claim.same { --tone: var(--same); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; font-size: .875rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 60rem) { body { display: block; } nav { position: static; min-height: 0; max-height: none;
  border-right: 0; border-top: 1px solid var(--line); } main { padding: 1rem; }
  body { display: flex; flex-direction: column; } nav { order: 2; }
  h1 { font-size: 1.2rem; margin-bottom: .5rem; } .answer .sentence { font-size: 1.1rem; }
  .answer .three { grid-template-columns: 1fr; gap: .75rem; }
  .strip thead, .strip small { display: none; } .strip table, .strip tbody { display: block; }
  .strip tr { display: grid; grid-template-columns: 1fr auto auto; padding: .3rem 0;
    border-bottom: 1px solid var(--line); }
  .strip td, .strip th { border: 0; padding: .1rem .4rem .1rem 0; }
  .strip td.bar { grid-column: 1 / -1; order: 3; width: auto; } .strip td.said { grid-column: 1 / -1; }
  .strip td:last-child { grid-column: 1 / -1; display: none; } }
@media print { :root { --ink: #000; --paper: #fff; --soft: #444; --line: #bbb; --panel: #f5f5f5; }
  body { display: block; font-size: 10.5pt; } nav { position: static; border: 0; min-height: 0; padding: 0; }
  main { padding: 0; max-width: none; } .table { overflow: visible; max-height: none; }
  .plot { max-width: 17cm; } .modebar { display: none !important; } details { display: none; }
  h2, h2 + p { break-after: avoid; } p, tr { break-inside: avoid; }
  details.more { display: block; } details.more > summary { display: none; }
  nav { display: none; } .answer .sentence { font-size: 14pt; } a { color: inherit; }
  th { position: static; } }
"""

SCRIPT = """
(function () {
  'use strict';
  var dark = window.matchMedia('(prefers-color-scheme: dark)');
  function themed(layout, night) {
    var ink = night ? '#e4e8ec' : '#1c2126', grid = night ? '#343c44' : '#e3e7eb';
    var out = JSON.parse(JSON.stringify(layout));
    out.paper_bgcolor = 'rgba(0,0,0,0)';
    out.plot_bgcolor = 'rgba(0,0,0,0)';
    out.font = { color: ink, size: 13, family: 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif' };
    out.margin = { l: 60, r: 20, t: 30, b: 50 };
    Object.keys(out).concat(['xaxis', 'yaxis']).forEach(function (name) {
      if (!/^[xy]axis\\d*$/.test(name)) { return; }
      var axis = out[name] = out[name] || {};
      axis.gridcolor = grid; axis.linecolor = grid;
      if (axis.zeroline === undefined) { axis.zerolinecolor = grid; }
    });
    out.hoverlabel = { align: 'left' };
    out.modebar = { bgcolor: 'rgba(0,0,0,0)', color: night ? '#6b7782' : '#b4bcc4', activecolor: ink };
    (out.annotations || []).forEach(function (word) {
      if (word.textangle === -90) { word.bgcolor = night ? 'rgba(21,25,29,.85)' : 'rgba(255,255,255,.85)'; }
    });
    return out;
  }
  function each(work) {
    document.querySelectorAll('figure').forEach(function (figure) {
      var source = figure.querySelector('script[type="application/json"]');
      var plot = figure.querySelector('.plot');
      if (source && plot) { work(plot, source); }
    });
  }
  function render(night) {
    each(function (plot, source) {
      var drawn = JSON.parse(source.textContent);
      Plotly.react(plot, drawn.data, themed(drawn.layout, night),
        { responsive: true, displaylogo: false, showLink: false, showSendToCloud: false });
    });
  }
  if (typeof Plotly === 'undefined') { return; }
  render(dark.matches);
  document.querySelectorAll('details.more').forEach(function (folded) {
    folded.addEventListener('toggle', function () {
      folded.querySelectorAll('.plot').forEach(function (plot) { Plotly.Plots.resize(plot); });
    });
  });
  dark.addEventListener('change', function () { render(dark.matches); });
  window.addEventListener('beforeprint', function () {
    document.querySelectorAll('details.more').forEach(function (folded) { folded.open = true; });
    render(false);
    each(function (plot) { Plotly.relayout(plot, { width: 640 }); });
  });
  window.addEventListener('afterprint', function () { render(dark.matches); });
})();
"""
