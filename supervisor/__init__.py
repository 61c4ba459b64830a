"""What supervises a run: the machine, the run, its record."""

import sys


def import_asyncio_without_tls() -> None:
    """Import asyncio without the OpenSSL library, for which memtop has no use there.

    That saves 4 MiB of memory and 10 ms. The module ssl can still be imported afterwards, but
    asyncio's own connections have no TLS in this process.
    """
    if "asyncio" in sys.modules or "ssl" in sys.modules:
        return
    sys.modules["ssl"] = None  # type: ignore[assignment]  # makes `import ssl` fail
    try:
        import asyncio  # noqa: F401 - for later imports
    finally:
        del sys.modules["ssl"]
