"""The page as a browser shows it: every figure drawn, nothing logged, nothing wider than 1280 pixels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvik_lab.report.html import to_html
from tests.lab.report.gallery import HOSTILE, gallery

CHECK = """<script>
window.addEventListener('load', function () {
  setTimeout(function () {
    var plots = Array.from(document.querySelectorAll('.plot'));
    var done = plots.filter(function (p) { return p.querySelector('.main-svg'); }).length;
    document.body.setAttribute('data-seen', [done, plots.length, document.documentElement.scrollWidth,
      window.innerWidth, document.querySelectorAll('img[src=x]').length].join(' '));
  }, 1500);
});
</script></body>"""


@pytest.mark.timeout(300)
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium")
    page = tmp_path / "report.html"
    page.write_text(to_html(gallery(HOSTILE)).replace("</body>", CHECK), encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000"]
    command += ["--window-size=1280,2000", "--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri()]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    seen = re.search(r'data-seen="([\d ]+)"', done.stdout)
    assert seen is not None, done.stdout[-2000:]
    plots, wanted, width, window, images = map(int, seen.group(1).split())
    assert plots == wanted == 11
    assert width <= window
    assert images == 0
