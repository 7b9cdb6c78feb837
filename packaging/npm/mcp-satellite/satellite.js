#!/usr/bin/env node
// Starts the binary of the platform package with the same arguments, stdio and signals.
"use strict";

const { spawn } = require("node:child_process");
const { constants } = require("node:os");

const PLATFORM_PACKAGE = "@mcp-satellite/linux-x64";

function binary() {
  try {
    return require.resolve(`${PLATFORM_PACKAGE}/bin/satellite`);
  } catch {
    const here = `${process.platform}-${process.arch}`;
    console.error(
      here === "linux-x64"
        ? `mcp-satellite: the package ${PLATFORM_PACKAGE} is not installed; install without --omit=optional (the binary needs glibc)`
        : `mcp-satellite: there is no binary for ${here}, only for linux-x64; on Windows use WSL 2`,
    );
    process.exit(1);
  }
}

const child = spawn(binary(), process.argv.slice(2), { stdio: "inherit" });
child.on("error", (error) => {
  console.error(`mcp-satellite: cannot start ${child.spawnfile}: ${error.message}`);
  process.exit(1);
});
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) {
  process.on(signal, () => {
    // A terminal sends SIGINT and SIGHUP to the child, too. A second signal would end the satellite at once.
    const fromTerminal = signal !== "SIGTERM" && process.stdin.isTTY;
    if (!fromTerminal) child.kill(signal);
  });
}
// The shell of npx does not forward signals, and its end leaves this process behind.
if (process.env.npm_command === "exec") {
  const parent = process.ppid;
  setInterval(() => process.ppid === parent || child.kill("SIGTERM"), 500).unref();
}
child.on("exit", (code, signal) => process.exit(signal ? 128 + constants.signals[signal] : code));
