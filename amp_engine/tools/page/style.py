"""The style of an HTML page: tables scroll if a window is narrow."""

# One root class, so that the page around it does not change. It sets its own colours, so that it is readable on any
# background; both colour schemes keep a contrast of 4.5 (WCAG 2.1, 1.4.3).
STYLE = """
.amp { --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #d0d7de; --shade: #f6f8fa; --mark: #0550ae;
  --bad: #b3261e; color-scheme: light dark; background: var(--paper); color: var(--ink); padding: 1em; text-align: left;
  font: 14px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 0 auto; box-sizing: border-box; }
@media (prefers-color-scheme: dark) { .amp { --ink: #e6edf3; --soft: #9da7b1; --paper: #0d1117; --line: #30363d;
  --shade: #161b22; --mark: #79c0ff; --bad: #ff9a91; } }
.amp * { box-sizing: border-box; }
.amp p, .amp h1, .amp pre { overflow-wrap: anywhere; } .amp a { color: var(--mark); }
.amp .wide { overflow-x: auto; }
.amp h1 { font-size: 22px; margin: 0 0 .2em; color: var(--ink); }
.amp h2 { font-size: 16px; margin: 1.8em 0 .5em; padding-bottom: .2em; border-bottom: 1px solid var(--line);
  color: var(--ink); }
.amp p, .amp details { margin: .4em 0; } .amp .title { font-weight: 600; }
.amp .soft { color: var(--soft); } .amp .bad { color: var(--bad); }
.amp code, .amp pre { font: 12.5px/1.45 ui-monospace, monospace; background: var(--shade); color: var(--ink); }
.amp pre { padding: .7em; white-space: pre-wrap; border: 1px solid var(--line); }
.amp table { border-collapse: collapse; width: 100%; margin: .5em 0; color: var(--ink); background: var(--paper);
  font-size: 13px; }
.amp th, .amp td { text-align: left; vertical-align: top; padding: .25em .6em .25em 0; border: 0;
  border-bottom: 1px solid var(--line); background: none; color: inherit; }
.amp th { color: var(--soft); font-weight: 600; }
.amp .n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.amp th.n { white-space: normal; }
.amp td.n:last-child, .amp th.n:last-child { padding-right: 0; }
.amp td.n + td:not(.n), .amp th.n + th:not(.n) { padding-left: .6em; }
.amp tr.changed td { color: var(--mark); font-weight: 600; }
.amp tr.total td { font-weight: 600; }
.amp summary { cursor: pointer; color: var(--mark); }
@media (max-width: 600px) { .amp { padding: .7em; } .amp table { font-size: 12px; }
  .amp th, .amp td { padding-right: .4em; } }
"""
