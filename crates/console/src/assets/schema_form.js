// Forms from JSON schemas. Part of the script of the console: see console.js.

/** Adds the fields of a JSON schema to a form. Returns a function that reads their values. */
function schemaForm(form, schema) {
  const readers = [];
  const required = new Set(schema.required ?? []);
  for (const [name, property] of Object.entries(schema.properties ?? {})) {
    const type = [property.type].flat().find((type) => type !== "null");
    const options = property.enum ?? property.oneOf?.map((one) => one.const);
    const needed = required.has(name);
    let field, read;
    if (options && type !== "object") {
      field = element("select", {}, ...(needed ? [] : [element("option", { value: "" }, "–")]),
        ...options.map((option, nth) => element("option", { value: nth }, shown(property.enumNames?.[nth] ?? property.oneOf?.[nth].title ?? option))));
      read = () => (field.value === "" ? undefined : options[field.value]);
      if (options.includes(property.default)) field.value = options.indexOf(property.default);
    } else if (type === "boolean") {
      field = element("select", {}, element("option", { value: "" }, "–"), element("option", { value: "true" }, "true"), element("option", { value: "false" }, "false"));
      read = () => (field.value === "" ? undefined : field.value === "true");
      if (needed || property.default !== undefined) field.value = String(property.default ?? false);
    } else if (type === "number" || type === "integer") {
      field = element("input", { type: "number", step: type === "integer" ? 1 : "any", min: property.minimum, max: property.maximum, required: needed });
      read = () => (field.value === "" ? undefined : Number(field.value));
      if (property.default !== undefined) field.value = property.default;
    } else if (type === "string") {
      const isLong = (property.maxLength ?? 0) > 200 || /content|text|body|code|query|prompt/i.test(name);
      field = isLong ? element("textarea", { required: needed }) : element("input", { type: "text", required: needed });
      read = () => (field.value === "" && !needed ? undefined : field.value);
      if (property.default !== undefined) field.value = property.default;
    } else {
      field = element("textarea", { required: needed, placeholder: type === "array" ? "[…]" : type === "object" ? "{…}" : "JSON" });
      if (property.default !== undefined) field.value = JSON.stringify(property.default);
      read = () => {
        if (field.value.trim() === "") return undefined;
        try {
          return JSON.parse(field.value);
        } catch (error) {
          throw new Error(`${name} is not valid JSON: ${error.message}`);
        }
      };
    }
    readers.push([name, read]);
    form.append(element("label", {}, element("span", {}, shown(property.title ?? name), needed ? " (required)" : ""), field,
      element("span", { class: "help" }, shown(property.description ?? ""))));
  }
  if (!readers.length) form.append(element("p", { class: "help" }, "No arguments."));
  return () => Object.fromEntries(readers.map(([name, read]) => [name, read()]).filter(([, value]) => value !== undefined));
}
