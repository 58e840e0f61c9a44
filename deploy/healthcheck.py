"""Is the process of this container alive? For the HEALTHCHECK of the image: exit status 0 or 1.

Asks `/livez` on TIDEGATE_METRICS_PORT, where a worker answers, then on TIDEGATE_PORT, where the API does. With the
argument `readyz`: can it do its work, too? A port as the second argument is the only one that is asked: name it where
another process may answer on one of the two, as on the host's network.
"""

import http.client
import os
import sys

TIMEOUT_SECONDS = 2


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("localhost", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> int:
    path = f"/{sys.argv[1] if len(sys.argv) > 1 else 'livez'}"
    given = sys.argv[2:] or [os.environ.get("TIDEGATE_METRICS_PORT", "0"), os.environ.get("TIDEGATE_PORT", "8700")]
    return 0 if any(answers(int(port), path) for port in given if port not in ("", "0")) else 1


if __name__ == "__main__":
    sys.exit(main())
