"""A browser that is told what to do: as much of the WebDriver protocol as the tests need, by chromedriver."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # as the protocol calls it
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size={},{}")


class Browser:
    def __init__(self, address, size, dark=False):
        self.address = address
        arguments = [one.format(*size) for one in ARGUMENTS] + ["--force-dark-mode"] * dark
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        found = self.call("POST", "/session", {"capabilities": {"alwaysMatch": {"browserName": "chrome", **options}}})
        self.session = f"/session/{found['sessionId']}"

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as found:
            return json.load(found)["value"]

    def do(self, what, **body):
        return self.call("POST", f"{self.session}/{what}", body)

    def open(self, url):
        self.do("url", url=url)

    def run(self, script):
        return self.do("execute/sync", script=script, args=[])

    def type(self, selector, text):
        """Keys, into an element that is emptied before."""
        element = self.do("element", using="css selector", value=selector)[ELEMENT]
        self.do(f"element/{element}/clear")
        self.do(f"element/{element}/value", text=text)

    def wait_for(self, script, seconds=60):
        """Until a script returns something."""
        for _ in range(10 * seconds):
            if found := self.run(script):
                return found
            time.sleep(0.1)
        raise TimeoutError(script)

    def console(self):
        """What was written there since it was asked last."""
        return self.do("se/log", type="browser")

    def screenshot(self):
        return base64.b64decode(self.call("GET", f"{self.session}/screenshot"))


@contextmanager
def browser(size=(1200, 1400), dark=False):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([shutil.which("chromedriver"), f"--port={port}"], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/status").close()
                break
            except OSError:
                time.sleep(0.1)
        found = Browser(address, size, dark)
        try:
            yield found
        finally:
            found.call("DELETE", found.session)
    finally:
        driver.terminate()
        driver.wait()
