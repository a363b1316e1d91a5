"""``playground``: schedules side by side on a page, to compare and to change by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.cli.options import tell


def playground(
    port: Annotated[int, typer.Option(help="Port on this machine; 0 for any that is free.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    export: Annotated[
        Path | None, typer.Option(help="Write the page as static files to this folder, which needs no server of ours.")
    ] = None,
    pyodide: Annotated[
        Path | None,
        typer.Option(help="With --export: the folder of npm's package pyodide, Python for web pages, to copy."),
    ] = None,
) -> None:
    """Open a page on which all schedules are timed, compared and changed by hand; it is for this machine alone."""
    from gpipe_bench.playground.page import export as write_page
    from gpipe_bench.playground.server import local_server
    from gpipe_bench.util.files import check_writable

    if export is not None:
        check_writable(export / "index.html")
        write_page(export, pyodide)
        typer.echo(f"wrote {export / 'index.html'} and what it needs; serve the folder, since file:// has no workers")
        if pyodide is None and not (export / "pyodide").is_dir():
            tell(f"without Python: npm install pyodide, and copy node_modules/pyodide to {export / 'pyodide'}")
        return
    with local_server(port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        typer.echo(f"the playground is at {address} (Ctrl+C ends it)")
        if browser:
            import webbrowser

            webbrowser.open(address)
        server.serve_forever()
