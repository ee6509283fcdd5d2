"""``python -m fedpdmc`` and the console script: Ctrl-C has a clean end from the first import on."""

from fedpdmc.console.interrupts import run_command


def main() -> None:
    """Run the command line."""

    def work() -> None:
        from fedpdmc.cli import app

        app(prog_name="fedpdmc")

    run_command(work)


if __name__ == "__main__":
    main()
