"""Django's settings, for a shop that needs nothing outside its process."""

from __future__ import annotations

import secrets

_PARTS = ("analytics", "checkout", "address", "shipping", "catalogue", "communication", "partner", "basket", "payment",
          "offer", "order", "customer", "search", "voucher", "wishlists", "dashboard")  # fmt: skip
_DASHBOARDS = ("reports", "users", "orders", "catalogue", "offers", "partners", "pages", "ranges", "reviews",
               "vouchers", "communications", "shipping")  # fmt: skip
_CONTRIBUTED = ("auth", "contenttypes", "sessions", "messages", "staticfiles", "sites", "flatpages")

# jQuery comes from the shop itself. There are no pictures, and so no frames for them. The score of a review is chosen
# from its list: over that the shop lays stars, which a reader of the page's text cannot tell apart.
_BASE = """{% extends "oscar/base.html" %}{% load static %}
{% block extrahead %}<style>
.image_container, .carousel, .img-thumbnail, .reviewrating .star-rating { display: none }
.reviewrating select { display: block !important }
</style>{% endblock %}
{% block cdn_scripts %}<script src="{% static "oscar/js/jquery/jquery.min.js" %}"></script>{% endblock %}"""
# The original says that whoever runs the shop has to write this page, and where to read how.
_PAYMENT = """{% extends "oscar/checkout/payment_details.html" %}{% block payment_details_content %}
<p>You pay when it is delivered.</p><a href="{% url 'checkout:preview' %}" class="btn btn-primary btn-lg">Continue</a>
{% endblock %}"""


class NoPictures:
    """Of those, there are no small ones either."""

    def generate_thumbnail(self, source: object, **_: object) -> str:
        return ""


def set_up() -> None:
    import django
    from django.conf import settings
    from oscar import defaults

    here = __package__
    templates = {"oscar/base.html": _BASE, "oscar/checkout/payment_details.html": _PAYMENT}
    loaders = [("django.template.loaders.locmem.Loader", templates), "django.template.loaders.app_directories.Loader"]
    settings.configure(
        **{name: getattr(defaults, name) for name in dir(defaults) if name.isupper()}
        | {
            "SECRET_KEY": secrets.token_hex(),
            "ALLOWED_HOSTS": ["127.0.0.1"],
            "ROOT_URLCONF": f"{here}.urls",
            "SITE_ID": 1,
            "DEBUG_PROPAGATE_EXCEPTIONS": True,  # to the server, which prints them: Django would only send a mail
            "INSTALLED_APPS": [
                *(f"django.contrib.{name}" for name in _CONTRIBUTED),
                "oscar.config.Shop",
                *(f"oscar.apps.{name}.apps.{name.capitalize()}Config" for name in _PARTS),
                "oscar.apps.catalogue.reviews.apps.CatalogueReviewsConfig",
                *(f"oscar.apps.dashboard.{name}.apps.{name.capitalize()}DashboardConfig" for name in _DASHBOARDS),
                "widget_tweaks",
                "haystack",
                "treebeard",
                "django_tables2",
            ],
            "MIDDLEWARE": [
                "django.contrib.sessions.middleware.SessionMiddleware",
                "django.middleware.csrf.CsrfViewMiddleware",
                "django.contrib.auth.middleware.AuthenticationMiddleware",
                "django.contrib.messages.middleware.MessageMiddleware",
                "oscar.apps.basket.middleware.BasketMiddleware",
            ],
            "TEMPLATES": [
                {
                    "BACKEND": "django.template.backends.django.DjangoTemplates",
                    "OPTIONS": {
                        "loaders": [("django.template.loaders.cached.Loader", loaders)],
                        "context_processors": [
                            "django.template.context_processors.request",
                            "django.contrib.auth.context_processors.auth",
                            "django.contrib.messages.context_processors.messages",
                            "oscar.apps.search.context_processors.search_form",
                            "oscar.apps.checkout.context_processors.checkout",
                            "oscar.apps.communication.notifications.context_processors.notifications",
                            "oscar.core.context_processors.metadata",
                        ],
                    },
                }
            ],
            # An episode's database is thrown away with it, so nothing has to be safe from a power cut.
            "DATABASES": {
                "default": {
                    "ENGINE": here,
                    "NAME": "shop",
                    "ATOMIC_REQUESTS": True,
                    "OPTIONS": {"init_command": "pragma synchronous = off"},
                }
            },
            "DEFAULT_AUTO_FIELD": "django.db.models.AutoField",
            # Tables are made as they are now: the history of how they came to be takes 14 s and ends in the same.
            "MIGRATION_MODULES": dict.fromkeys((*_CONTRIBUTED, *_PARTS, "reviews")),
            "AUTHENTICATION_BACKENDS": ["oscar.apps.customer.auth_backends.EmailBackend"],
            "PASSWORD_HASHERS": ["django.contrib.auth.hashers.MD5PasswordHasher"],  # nobody's secrets
            "SESSION_ENGINE": "django.contrib.sessions.backends.signed_cookies",
            # Episodes would share any other.
            "CACHES": {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}},
            "EMAIL_BACKEND": "django.core.mail.backends.dummy.EmailBackend",
            "HAYSTACK_CONNECTIONS": {"default": {"ENGINE": f"{here}.search.ShopEngine"}},
            "HAYSTACK_SIGNAL_PROCESSOR": "haystack.signals.BaseSignalProcessor",  # no index has to be kept up to date
            "STATIC_URL": "/static/",
            "LANGUAGE_CODE": "en",
            "LANGUAGES": [("en", "English")],  # the list of all would be most of every page
            "USE_TZ": True,
            "TIME_ZONE": "UTC",
            "OSCAR_SHOP_NAME": "Shop",
            "OSCAR_SHOP_TAGLINE": "",
            "OSCAR_THUMBNAILER": f"{here}.settings.NoPictures",
            "OSCAR_ALLOW_ANON_REVIEWS": False,
            "OSCAR_HIDDEN_FEATURES": ["wishlists"],  # no task needs any, and they stand beside every product
        }
    )
    django.setup()
