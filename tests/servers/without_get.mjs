// Removes the GET stream from a server, as on many deployed servers: clients notice its end only at the next request.
// Loaded by node with --import.
import { Server } from "node:http";

const emit = Server.prototype.emit;
Server.prototype.emit = function (event, request, response) {
  if (event === "request" && request.method === "GET") {
    response.writeHead(405, { allow: "POST, DELETE" }).end();
    return true;
  }
  return emit.apply(this, arguments);
};
