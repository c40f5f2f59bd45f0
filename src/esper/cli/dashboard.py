"""`esper dashboard`: runs in a browser."""

from threading import Event

from rich.console import Console

from esper.cli import options
from esper.karn.serving import LOCAL, serve


def run(options: options.Dashboard, console: Console) -> None:
    with serve(options.runs, options.host, options.port) as page:
        newest = page.gallery.newest()
        console.print(page.url + (f"#run={newest}" if newest else ""), soft_wrap=True)
        if options.host not in (LOCAL, "localhost", "::1"):
            console.print("whoever reaches this address and knows the token reads these runs", style="yellow")
        console.print("Ctrl-C ends it", style="dim")
        try:
            Event().wait()
        except KeyboardInterrupt:
            return
