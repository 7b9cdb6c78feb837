//! `/mcp?mode=flat`: the tools of all of a caller's servers themselves, in one list, and so their prompts and resources.
//! What is here is one picture of that: what is listed, whose each thing is, and whether two pictures differ.

use std::collections::HashMap;

use mcp_satellite_actors::model::catalogue::{Aspect, Catalogue, Entry};
use mcp_satellite_actors::model::ids::InstanceId;

use super::names;
use super::tools::Caller;
use super::tools::raw::respelled;
use super::tools::resources::{UI, qualified};

/// Everything that a caller is offered at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flat {
    tools: Named,
    prompts: Named,
    resources: Vec<String>,
    resource_templates: Vec<String>,
}

/// What is called by a name: definitions in order, and whose each name is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Named {
    definitions: Vec<String>,
    owners: HashMap<String, (InstanceId, Box<str>)>,
}

impl Flat {
    /// As it is now.
    pub fn of(caller: &Caller) -> Self {
        let offered: Vec<(String, InstanceId, &Catalogue)> = caller
            .servers()
            .filter_map(|(label, view)| Some((label, view.spec.id.clone(), &**view.offered()?)))
            .collect();
        let tools = offered.iter().flat_map(|(label, id, catalogue)| {
            catalogue.tools.iter().map(move |tool| Thing { label, id, name: &tool.name, raw: tool.raw.get() })
        });
        let prompts = offered.iter().flat_map(|(label, id, catalogue)| {
            catalogue.prompts.iter().map(move |prompt| Thing { label, id, name: &prompt.key, raw: prompt.raw.get() })
        });
        let entries = |list: fn(&Catalogue) -> &[Entry], key: &str| -> Vec<String> {
            let of = |(label, _, catalogue): &(String, InstanceId, &Catalogue)| -> Vec<String> {
                let spell = |uri: &str| qualified(label, uri);
                let spelled = |entry: &Entry| respelled(&respelled(entry.raw.get(), &[key], spell), &UI, spell);
                list(catalogue).iter().map(spelled).collect()
            };
            offered.iter().flat_map(of).collect()
        };
        Self {
            tools: Named::of(&tools.collect::<Vec<_>>()),
            prompts: Named::of(&prompts.collect::<Vec<_>>()),
            resources: entries(|catalogue| &catalogue.resources, "uri"),
            resource_templates: entries(|catalogue| &catalogue.resource_templates, "uriTemplate"),
        }
    }

    /// The result of `tools/list`.
    pub fn tools(&self) -> String {
        list("tools", &self.tools.definitions)
    }

    /// The result of `prompts/list`.
    pub fn prompts(&self) -> String {
        list("prompts", &self.prompts.definitions)
    }

    /// The result of `resources/list`.
    pub fn resources(&self) -> String {
        list("resources", &self.resources)
    }

    /// The result of `resources/templates/list`.
    pub fn resource_templates(&self) -> String {
        list("resourceTemplates", &self.resource_templates)
    }

    /// Whose tool this is, and by what name its server knows it.
    pub fn tool(&self, name: &str) -> Option<(&InstanceId, &str)> {
        self.tools.owner(name)
    }

    /// Whose prompt this is, and by what name its server knows it.
    pub fn prompt(&self, name: &str) -> Option<(&InstanceId, &str)> {
        self.prompts.owner(name)
    }

    /// What a client that has seen `before` must be told to read again.
    pub fn since(&self, before: &Self) -> Vec<Aspect> {
        let all = [
            (Aspect::Tools, self.tools != before.tools),
            (
                Aspect::Resources,
                self.resources != before.resources || self.resource_templates != before.resource_templates,
            ),
            (Aspect::Prompts, self.prompts != before.prompts),
        ];
        all.into_iter().filter(|(_, changed)| *changed).map(|(aspect, _)| aspect).collect()
    }
}

struct Thing<'a> {
    label: &'a str,
    id: &'a InstanceId,
    name: &'a str,
    raw: &'a str,
}

impl Named {
    fn of(things: &[Thing<'_>]) -> Self {
        let pairs: Vec<(&str, &str)> = things.iter().map(|thing| (thing.label, thing.name)).collect();
        let mut named = Self::default();
        for (thing, name) in things.iter().zip(names::flat(&pairs)) {
            // A server that lists a name twice means the first: no client takes two of one name.
            if named.owners.contains_key(&name) {
                continue;
            }
            let spelled = respelled(thing.raw, &["name"], |_| name.clone());
            named.definitions.push(respelled(&spelled, &UI, |uri| qualified(thing.label, uri)));
            named.owners.insert(name, (thing.id.clone(), thing.name.into()));
        }
        named
    }

    fn owner(&self, name: &str) -> Option<(&InstanceId, &str)> {
        self.owners.get(name).map(|(id, name)| (id, &**name))
    }
}

fn list(name: &str, definitions: &[String]) -> String {
    format!("{{\"{name}\":[{}]}}", definitions.join(","))
}
