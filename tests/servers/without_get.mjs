// As many deployed servers are: no stream to listen on, so nobody sees them go before something is asked.
// To be given to node with --import.
import { Server } from "node:http";

const emit = Server.prototype.emit;
Server.prototype.emit = function (event, request, response) {
  if (event === "request" && request.method === "GET") {
    response.writeHead(405, { allow: "POST, DELETE" }).end();
    return true;
  }
  return emit.apply(this, arguments);
};
