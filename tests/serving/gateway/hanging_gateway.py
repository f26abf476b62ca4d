"""Stand-in for the process of smg: it is ready twice, and then gives no answer."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        if Handler.asked > 2:
            time.sleep(3600)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    arguments = json.loads(sys.stdin.readline())
    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
