"""`esper dashboard`: runs in a browser."""

import webbrowser
from threading import Event

from rich.console import Console

from esper.cli import options
from esper.karn.serving import LOCAL, Dashboard


def run(options: options.Dashboard, console: Console) -> None:
    with Dashboard(options.runs, options.host, options.port) as page:
        console.print(page.url, soft_wrap=True)
        if options.host not in (LOCAL, "localhost", "::1"):
            console.print("whoever reaches this address and knows the token reads these runs", style="yellow")
        console.print("Ctrl-C ends it", style="dim")
        if options.browser:
            webbrowser.open(page.url)
        try:
            Event().wait()
        except KeyboardInterrupt:
            return
